"""What people type: the toolkit of command lines, and the commands of ``mig-manager``."""
