"""The node agent: from the node's label to the published outcome."""
