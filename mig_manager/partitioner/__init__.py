"""The partitioner: one Deployment that repartitions nodes for pending pods."""
