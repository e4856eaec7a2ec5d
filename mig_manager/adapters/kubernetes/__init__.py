"""The Kubernetes API; ``client`` is the only module to import the official client.

Its package files import all the rest of it as well, which is 16 MB and 150 ms of CPU:
generated models on pydantic, OAuth on requests, a second client on aiohttp. Those are loaded by
their first use, which in a pod never comes.
"""

from mig_manager.adapters import sparing

for _package in ("kubernetes", "kubernetes.config", "kubernetes.utils"):
    sparing.hollow(_package)
# It is asked for the version of an HTTP/2 library when somebody switches HTTP/2 on.
sparing.hollow("importlib.metadata")
with sparing.called_later("importlib.metadata", "version"):
    import urllib3  # noqa: F401 - here first
