"""The Kubernetes API; only ``api`` and ``credentials`` import the official client.

The client's package files import the whole client: generated models on pydantic, OAuth on
requests, a second client on aiohttp. That costs 16 MB and 150 ms of CPU. They run at their first
use, which in a pod never comes.
"""

from typing import Any

from mig_manager.adapters import lean_imports

for _package in ("kubernetes", "kubernetes.config", "kubernetes.utils"):
    lean_imports.skip_init(_package)
# urllib3 asks for the version of an HTTP/2 library once HTTP/2 is enabled.
lean_imports.skip_init("importlib.metadata")
with lean_imports.deferred_class("importlib.metadata", "version"):
    import urllib3  # noqa: F401 - here first


def kube_config() -> Any:
    """Import the loader of kubeconfig files, without OAuth, which only a token's renewal needs."""
    for package in ("oauthlib", "oauthlib.oauth2", "requests_oauthlib"):
        lean_imports.skip_init(package)
    with (
        lean_imports.deferred_class("kubernetes.client", "ApiClient"),
        lean_imports.deferred_class("requests_oauthlib", "OAuth2Session"),
    ):
        import kubernetes.config.kube_config  # noqa: PLC0415 - in a pod there is no kubeconfig
    return kubernetes.config.kube_config
