"""The partitioner: one Deployment that has nodes repartitioned for what pending pods ask for."""
