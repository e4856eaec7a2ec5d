"""The edges: every module hides one external interface, and translates its errors."""
