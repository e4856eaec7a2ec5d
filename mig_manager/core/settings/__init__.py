"""Options, and the settings that several programs share."""
