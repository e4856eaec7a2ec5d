"""The commands of ``kubectl mig``, a module each."""
