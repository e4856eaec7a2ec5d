"""Where the value of an option comes from, and the options of NVIDIA's tools."""
