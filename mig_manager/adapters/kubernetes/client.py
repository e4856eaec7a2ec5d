"""What we use of the official Kubernetes client; the only importer of ``kubernetes``.

That is what is hard to get right: finding the cluster, credentials and their rotation, TLS,
proxies. What comes with it and is not for us is spared by this folder's package file.
"""

from typing import Any

import kubernetes.client.configuration
import kubernetes.client.exceptions
import kubernetes.client.rest
import kubernetes.config.config_exception
import kubernetes.config.incluster_config

from mig_manager.adapters import sparing

ApiException = kubernetes.client.exceptions.ApiException
ConfigException = kubernetes.config.config_exception.ConfigException
Configuration = kubernetes.client.configuration.Configuration
RESTClientObject = kubernetes.client.rest.RESTClientObject
RESTResponse = kubernetes.client.rest.RESTResponse


def load_incluster_config(configuration: Configuration) -> None:
    """Take address and credentials of our pod's service account.

    Raises:
        Exception: Whatever a missing or bad file provokes.
    """
    kubernetes.config.incluster_config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]


def load_kube_config(path: str, configuration: Configuration) -> None:
    """Take address and credentials of a kubeconfig file; see the client for what it may hold.

    Raises:
        Exception: Whatever a missing or bad file provokes.
    """
    _kube_config().load_kube_config(path, client_configuration=configuration, persist_config=False)


def _kube_config() -> Any:
    """Import the loader; what it needs for OpenID Connect alone comes with the first renewal."""
    for package in ("oauthlib", "oauthlib.oauth2", "requests_oauthlib"):
        sparing.hollow(package)
    with (
        sparing.called_later("kubernetes.client", "ApiClient"),
        sparing.called_later("requests_oauthlib", "OAuth2Session"),
    ):
        import kubernetes.config.kube_config  # noqa: PLC0415 - in a pod there is no kubeconfig
    return kubernetes.config.kube_config
