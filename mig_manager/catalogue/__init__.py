"""The MIG products: profiles and placements of each, by the names that people know."""
