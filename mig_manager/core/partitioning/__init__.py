"""Which nodes get other GPU instances for pending pods: demand, room and holds."""
