"""Find a cluster and the credentials for it: by a kubeconfig file, or as a pod."""

import contextlib
import logging
import os
import pathlib
import threading
import urllib.request
from collections.abc import Iterator
from typing import NoReturn

import kubernetes.client.configuration
import kubernetes.config.config_exception
import kubernetes.config.incluster_config
import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import kube_config

_SLOW_S = 10.0
_LOOPBACK = "localhost,127.0.0.0/8,::1"

_log = structlog.get_logger()


class Loader:
    """Loads credentials into a client's configuration, again if their file has changed."""

    def __init__(
        self,
        configuration: kubernetes.client.configuration.Configuration,
        kubeconfig: str | None,
        context: str | None = None,
        *,
        slow_s: float = _SLOW_S,
    ) -> None:
        """Load nothing yet; without a kubeconfig, our pod's service account is used."""
        self._configuration = configuration
        self._kubeconfig = kubeconfig
        self._context = context
        self._paths = kubeconfig.split(os.pathsep) if kubeconfig else ()
        self._slow_s = slow_s
        self._loaded: object = None  # the versions of the files when they were loaded

    def load(self) -> None:
        """Load the credentials.

        Raises:
            UsageError: There is no usable configuration.
        """
        versions = self._versions
        try:
            if self._kubeconfig is None:
                kubernetes.config.incluster_config.load_incluster_config(self._configuration)  # type: ignore[no-untyped-call]
            else:
                with _failed_programs_raised(), logged_if_slow(self._slow_s):
                    kube_config().load_kube_config(
                        self._kubeconfig,
                        context=self._context,
                        client_configuration=self._configuration,
                        persist_config=False,
                    )
        except Exception as error:  # noqa: BLE001 - a bad file makes the loader raise anything
            where = (
                f"kubeconfig {self._kubeconfig}"
                if self._kubeconfig
                else "no kubeconfig, and not in a pod of a cluster"
            )
            # As the loader looks for them; pathlib raises errors for impossible paths.
            is_found = any(map(os.path.exists, map(os.path.expanduser, self._paths)))
            why = "no such file" if self._paths and not is_found else _text(error)
            raise errors.UsageError(
                f"no credentials for a Kubernetes API: {where}: {why}",
                remedy="Name a kubeconfig with --kubeconfig or KUBECONFIG.",
            ) from None
        self._configuration.no_proxy = _no_proxy(self._configuration.proxy)
        self._loaded = versions

    @property
    def has_kubeconfig(self) -> bool:
        """Whether the credentials are a kubeconfig's, which may name a program."""
        return self._kubeconfig is not None

    @property
    def is_outdated(self) -> bool:
        """Whether the kubeconfig has changed since it was loaded."""
        return self._versions != self._loaded

    @property
    def _versions(self) -> object:
        return [_version(path) for path in self._paths]


def _version(path: str) -> tuple[int, ...]:
    """Return what changes with a file; empty for none."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        status = pathlib.Path(path).expanduser().stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return ()


def _no_proxy(proxy: str | None) -> str:
    """Return the hosts to reach without this proxy, as kubectl does.

    A proxy of the environment is for no loopback address (golang.org/x/net/http/httpproxy), and
    the official client knows no address in brackets. A kubeconfig's proxy is for all hosts.
    """
    proxies = urllib.request.getproxies()
    if proxy not in proxies.values():
        return ""
    hosts = (host.strip() for host in proxies.get("no", "").split(","))
    return ",".join(
        (_LOOPBACK, *(host[1:-1] if host[:1] + host[-1:] == "[]" else host for host in hosts))
    )


def _text(error: Exception) -> str:
    """Return the loader's error in one line."""
    match error:
        case TypeError():
            # The loader uses what it parsed as it is.
            return "not a kubeconfig"
        case OSError(strerror=str(text)):
            return text
        case _:
            return " ".join(str(error).split()).rstrip(".")


@contextlib.contextmanager
def logged_if_slow(slow_s: float = _SLOW_S) -> Iterator[None]:
    """Log an error if loading credentials takes longer than so many seconds.

    The loader waits without a limit for a kubeconfig's program, as kubectl does: a person may
    have to log in.
    """
    timer = threading.Timer(slow_s, lambda: _log.error("credentials_awaited", after_s=slow_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _failed_programs_raised() -> Iterator[None]:
    """Raise the failure of a kubeconfig's program for credentials.

    The loader logs it, and goes on without credentials
    (``KubeConfigLoader._load_from_exec_plugin`` of kubernetes.config.kube_config).
    """

    def refuse(record: logging.LogRecord) -> NoReturn:
        message = record.getMessage().removeprefix("exec: ")
        raise kubernetes.config.config_exception.ConfigException(f"exec: {message}")

    logger = logging.getLogger()
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)
