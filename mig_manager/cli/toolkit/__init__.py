"""The parts shared by all command lines: options, help, completion, answers."""
