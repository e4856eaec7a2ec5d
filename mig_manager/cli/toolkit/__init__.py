"""What any command line of ours is built with: options, help, completion, answers."""
