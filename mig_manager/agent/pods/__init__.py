"""The node's pods: GPU users, advertisers, evictions and paused clients."""
