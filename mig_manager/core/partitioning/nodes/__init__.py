"""The nodes of one decision: as the API shows them, and sets of them."""
