"""The facts of a node for ``doctor``, each read once for all checks."""

import concurrent.futures
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from mig_manager import errors, gpu_ports
from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.host import procfs
from mig_manager.adapters.kubernetes import api, kube_node, pod_claims, pods
from mig_manager.adapters.nvml import worker_client
from mig_manager.cli.doctor import doctor_settings
from mig_manager.cli.doctor.doctor_report import Finding
from mig_manager.cli.toolkit import console
from mig_manager.core import gpu_processes, model
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import node_object, pod_object

_ATTEMPTS = 3  # attempts of an API request that fit into a check's time-out, pauses included
_NO_CLUSTER = "no kubeconfig; name one with --kubeconfig"
_MOUNTS = pathlib.Path("/proc/self/mountinfo")
_Fact = TypeVar("_Fact")


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A check; its name, meaning and remedy are in docs/observability.md."""

    name: str  # a public contract
    meaning: str  # a statement that the check verifies
    remedy: str  # used if the finding has no remedy of its own
    run: Callable[["Facts"], Iterable[Finding]]  # raises any error, or ``SkippedError``


def adding_to(
    checks: list[Check],
) -> Callable[[str, str], Callable[[Callable[["Facts"], Iterable[Finding]]], None]]:
    """Return a decorator with name and remedy that adds checks to a list.

    The function's docstring is the check's meaning.
    """
    return lambda name, remedy: (
        lambda run: checks.append(Check(name, run.__doc__ or "", remedy, run))
    )


class SkippedError(Exception):
    """Skip a check without failing it; the text says why."""


class Once(Generic[_Fact]):
    """A fact that several checks need: the first check reads it, the others wait.

    Args:
        ask: Reads it; its error is raised in all checks.
        what: Names it in findings of checks that need it.
    """

    def __init__(self, ask: Callable[[], _Fact], *, what: str) -> None:
        self._ask = ask
        self._what = what
        self._lock = threading.Lock()
        self._answer: concurrent.futures.Future[_Fact] = concurrent.futures.Future()

    def get(self) -> _Fact:
        """Return the fact.

        Raises:
            Exception: Reading it failed.
        """
        with self._lock:
            if not self._answer.done():
                try:
                    self._answer.set_result(self._ask())
                except BaseException as error:  # noqa: BLE001 - raised in every check
                    self._answer.set_exception(error)
        return self._answer.result()

    def require(self) -> _Fact:
        """Return the fact for a check that need not report its absence.

        Raises:
            SkippedError: It cannot be read; another check reports why.
        """
        try:
            return self.get()
        except SkippedError:
            raise
        except Exception as error:
            raise SkippedError(f"cannot be checked without {self._what}") from error

    def if_known(self) -> _Fact | None:
        """Return the fact, or None if it cannot be read."""
        try:
            return self.require()
        except SkippedError:
            return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one node."""

    settings: doctor_settings.DoctorSettings
    gpus: Once[model.ObservedGpus]
    inspection: Once[gpu_processes.Inspection]
    kube: Once[api.KubeApi]
    node: Once[node_object.NodeView]
    pods: Once[pod_object.Pods]  # the pods of this node
    allocatable: Once[Mapping[str, frozenset[str]]]
    """Device ids that kubelet can schedule, by resource."""
    slices: Once[tuple[claims.Slice, ...] | None]
    """The DRA driver's ResourceSlices; None: not listed here."""
    own_pod_uid: str | None

    @property
    def proc(self) -> pathlib.Path:
        """The kernel's ``/proc``.

        Raises:
            SkippedError: The GPUs are simulated.
        """
        if self.settings.proc is None:
            raise SkippedError("the GPUs are simulated")
        return self.settings.proc


def facts(
    settings: doctor_settings.DoctorSettings,
    replace_adapter: console.ReplaceAdapter = console.keep,
) -> Facts:
    """Prepare the facts of this node; nothing is read yet."""

    def connect() -> api.KubeApi:
        path = str(settings.kubeconfig) if settings.kubeconfig else None
        timeout_s = settings.timeout_s / _ATTEMPTS
        try:
            return api.KubeApi.connect(kubeconfig=path, request_timeout_s=timeout_s)
        except errors.UsageError as error:
            if settings.has_cluster:
                raise
            raise SkippedError(error.message if path else _NO_CLUSTER) from error

    def api_of_node() -> api.KubeApi:
        connected = kube.require()
        if not settings.node_name:
            raise SkippedError("no --node-name")
        return connected

    def allocatable() -> Mapping[str, frozenset[str]]:
        socket = settings.pod_resources_socket
        is_required = settings.has_kubelet or (
            settings.has_cluster and not settings.gpus.is_simulated
        )
        if not is_required and not socket.parent.is_dir():
            raise SkippedError(f"no kubelet: {socket.parent} does not exist")
        return pod_resources.PodResources(str(socket), timeout_s=settings.timeout_s).allocatable()

    command = gpu_ports.worker_command(
        settings.gpus,
        in_use_timeout_s=0.0,  # it changes nothing
        proc_root=None if settings.proc is None else str(settings.proc),
    )

    def worker() -> worker_client.WorkerGpus:
        gpus = worker_client.WorkerGpus(command=command, timeout_s=settings.timeout_s)
        return replace_adapter(gpus)

    def api_if_node_exists() -> api.KubeApi:
        node.require()
        return api_of_node()

    name = settings.node_name
    clock = host.SystemClock()
    kube = Once(connect, what="the cluster")
    node = Once(
        lambda: kube_node.KubeNode(api_of_node(), name=name, clock=clock).read(), what="the node"
    )
    return Facts(
        settings=settings,
        # Two workers: a hanging one must not delay the other.
        gpus=Once(lambda: worker().observe(), what="the GPUs"),
        inspection=Once(lambda: worker().inspect(), what="the GPUs"),
        kube=kube,
        node=node,
        pods=Once(
            lambda: pods.KubeWorkloads(api_if_node_exists(), node_name=name, clock=clock).list(),
            what="the pods of the node",
        ),
        allocatable=Once(allocatable, what="the devices that kubelet can schedule"),
        slices=Once(
            lambda: pod_claims.KubeSlices(api_if_node_exists(), node_name=name).list(),
            what="the ResourceSlices of the node",
        ),
        own_pod_uid=procfs.own_pod_uid(settings.own_pod_uid, _MOUNTS),
    )
