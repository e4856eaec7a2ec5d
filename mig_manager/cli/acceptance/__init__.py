"""The course of ``acceptance``, and how it reports."""
