"""A node-local manager for NVIDIA Multi-Instance GPU (MIG).

The folders are the layers, from the top: ``kubectl``, ``cli``, ``partitioner``, ``agent``,
``sandbox`` (a GPU node without GPUs or a cluster), ``adapters``, ``change`` (the transaction that
agent and command line share), ``catalogue``, ``core`` (decisions without I/O).
``docs/architecture.md`` has the map. The import of this package defers modules that its
dependencies import and most processes never use.
"""

from mig_manager.adapters import lean_imports

# structlog imports it, for its coroutines, and with it TLS: a third of a command's start.
lean_imports.defer("asyncio")
# dataclasses imports it, for the signature of a class without a docstring.
lean_imports.defer("inspect")
# pathlib does, for the URI of a path.
lean_imports.defer("urllib.parse", "quote_from_bytes")
# structlog does where it is installed, for tracebacks with colours: half of a command's start.
lean_imports.defer("rich.console", "Console")
lean_imports.defer("rich.pretty")
lean_imports.defer("rich.traceback", "Traceback")

__version__ = "0.1.0"
