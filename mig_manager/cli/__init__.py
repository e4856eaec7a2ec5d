"""The command line: the commands of ``mig-manager``, and the toolkit of all programs."""
