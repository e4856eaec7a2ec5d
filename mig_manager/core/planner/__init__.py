"""Plan the fewest steps from observed GPUs to a desired layout, and those of a rollback."""
