"""The daemons of a node, by their pods: GPU clients to pause, and other MIG managers."""
