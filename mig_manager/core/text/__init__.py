"""Text in and out: YAML trees with positions, messages, pictures, plain data."""
