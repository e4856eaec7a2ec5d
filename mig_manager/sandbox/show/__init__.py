"""The parts of the demonstration; ``sandbox.demo`` performs it.

``stages`` sets up cluster, node and the real agent, ``scenarios`` are the stories played there,
and ``timeline`` tells the audience what happens.
"""
