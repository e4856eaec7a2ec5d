"""Child processes for NVML: a hung call cannot be cancelled, a child can be killed."""
