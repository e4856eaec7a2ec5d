"""The demonstration: ``play`` runs one of the ``scenarios`` on a stage of ``stages``."""
