"""The pods of the node: who uses GPUs, who advertises them, who is evicted, who is paused."""
