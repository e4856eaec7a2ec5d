"""The edges: each module is the only one to know its neighbour, and translates its errors."""
