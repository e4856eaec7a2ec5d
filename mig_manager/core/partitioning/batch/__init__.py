"""The pods of one decision, and the nodes that can serve them."""
