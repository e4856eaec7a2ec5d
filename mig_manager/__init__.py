"""A node-local manager for NVIDIA Multi-Instance GPU (MIG).

``core`` decides without I/O; ``ports`` says what the pipeline needs of the world; ``adapters``
give it, one file per foreign library; ``reconcile`` is the one pipeline that agent and command
line share; ``sandbox`` is a GPU node without GPUs or a cluster; ``cli`` wires it all together.
"""

from mig_manager.adapters import sparing

# structlog imports it, for its coroutines, and with it TLS: a third of a command's start.
sparing.put_off("asyncio")
# dataclasses does, for the signature of those without a docstring.
sparing.put_off("inspect")
# pathlib does, for the URI of a path.
sparing.put_off("urllib.parse", "quote_from_bytes")

__version__ = "0.1.0"
