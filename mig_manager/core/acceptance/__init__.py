"""Whether GPUs behave as the catalogue and the simulated driver say."""
