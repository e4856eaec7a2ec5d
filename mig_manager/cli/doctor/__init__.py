"""What ``doctor`` looks at, by where it is found; each check is independent of the others."""
