"""One change of the GPUs, shared by the agent and the command line."""
