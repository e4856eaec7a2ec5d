"""What the agent does at rest, when the GPUs no longer have the layout of the last run."""
