"""What commands answer to people."""
