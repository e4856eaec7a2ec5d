"""The commands of ``mig-manager``, and their settings."""
