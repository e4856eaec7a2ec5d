"""Everything that people type: commands, their options, their answers."""
