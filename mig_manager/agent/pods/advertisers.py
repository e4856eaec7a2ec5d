"""The programs that advertise a node's devices: NVIDIA's device plugin and DRA driver.

The device plugin registers devices with kubelet, and the DRA driver publishes ResourceSlices. Both
list devices only when they start.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.agent import run_journal
from mig_manager.core import model
from mig_manager.core.node import claims, clients, pod_object, resources, well_known
from mig_manager.core.records import journals

_Pods = tuple[pod_object.Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A program that advertises devices, even if the node does not run it."""

    name: str
    deploy_label: str
    owns: Callable[[pod_object.Pod], bool]
    """Whether a pod is of this program."""
    why_not_starting: Callable[[Iterable[model.Gpu]], str] = lambda _gpus: ""
    """Why the layout may keep the program from starting, for a message. Empty for a program whose
    incompatible layouts are refused before the change."""


def _why_plugin_not_starting(gpus: Iterable[model.Gpu]) -> str:
    layouts = resources.gpu_layouts(gpus, {})
    causes = [
        f"with MIG strategy {strategy.value} it does not start: {why}"
        for strategy, why in resources.strategy_refusals(layouts).items()
    ]
    empty = resources.without_devices(layouts)
    if empty:
        causes.append(f"with mixed older ones do not start: no MIG device on {empty}")
    return "".join(f"; {cause}" for cause in causes)


PLUGIN = Kind(
    name="device plugin",
    deploy_label=well_known.PLUGIN_DEPLOY_LABEL,
    owns=clients.is_device_plugin,
    why_not_starting=_why_plugin_not_starting,
)
DRIVER = Kind(name="DRA driver", deploy_label=claims.DEPLOY_LABEL, owns=claims.is_driver)
KINDS = (PLUGIN, DRIVER)
DEPLOY_LABELS = tuple(kind.deploy_label for kind in KINDS)


class Advertiser(Protocol):
    """One program's devices on one node; ``Kind`` has everything that needs no port.

    Raises:
        ClusterError: From every method: the API refused or does not answer.
    """

    @property
    def kind(self) -> Kind:
        """The program."""

    def withdraw(self) -> None:
        """Hide the advertised devices from pods until new ones are advertised."""

    def missing(
        self, gpus: Sequence[model.Gpu], pods: _Pods, changed: frozenset[str]
    ) -> errors.NotReadyError | None:
        """Return how the advertised devices differ from the GPUs'; None if they match.

        All devices of the GPUs with the UUIDs ``changed`` must be healthy.
        """

    def is_stale(self, gpus: Sequence[model.Gpu]) -> bool:
        """Check whether a ready pod advertises outdated devices."""


def is_advertiser(pod: pod_object.Pod) -> bool:
    """Return whether a pod is the device plugin or the DRA driver."""
    return any(kind.owns(pod) for kind in KINDS)


def kinds_of(pods: _Pods) -> frozenset[Kind]:
    """Return the programs that these pods run."""
    return frozenset(kind for kind in KINDS if any(map(kind.owns, pods)))


def kinds_in(journal: journals.Journal) -> frozenset[Kind]:
    """Return the programs that served the node before they were paused."""
    has = {PLUGIN: journal.has_plugin, DRIVER: journal.has_dra_driver}
    return frozenset(kind for kind in KINDS if has[kind])


def expected_kinds(journal: run_journal.RunJournal) -> frozenset[Kind]:
    """Return the programs that must serve the node again, even without a pod now."""
    awaited = (kind for kind in KINDS if kind.deploy_label in journal.record.awaited)
    return kinds_in(journal.entries).union(awaited)


def uids(pods: _Pods) -> frozenset[str]:
    """Return the UIDs of the device plugin and DRA driver pods."""
    return frozenset(pod.uid for pod in pods if is_advertiser(pod))


def is_any_ready(pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether a pod is ready and not terminating."""
    return any(pod.is_ready and not pod.is_terminating for pod in pods)


class PodWaitsError(errors.NotReadyError):
    """A container of a plugin or driver pod cannot start."""

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message, reason=errors.Reason.PLUGIN_NOT_READY)
        self.why = why
        """Pods and kubelet's reasons, without details that change."""


def not_ready(kind: Kind, pods: _Pods, gpus: Iterable[model.Gpu]) -> errors.NotReadyError:
    """Return the error that no pod of a program is ready, with kubelet's reasons."""
    waiting = [pod for pod in pods if pod.waiting is not None]
    names = ", ".join(
        f"{pod.key} ({pod.waiting})" if pod.waiting is not None else pod.key for pod in pods
    )
    message = f"no new {kind.name} pod is ready: {names or 'none has started'}"
    message += kind.why_not_starting(gpus)
    if waiting:
        why = ", ".join(f"{pod.key} {pod.waiting.reason}" for pod in waiting if pod.waiting)
        return PodWaitsError(message, why=why)
    return errors.NotReadyError(message, reason=errors.Reason.PLUGIN_NOT_READY)


def not_allocatable(why: str) -> errors.NotReadyError | None:
    """Return the error that devices are not advertised; None if none is missing."""
    return errors.NotReadyError(why, reason=errors.Reason.NOT_ALLOCATABLE) if why else None
