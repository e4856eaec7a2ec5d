"""Wait until the GPUs' devices are schedulable, and remove obstacles.

Every function with ports or an attempt raises ClusterError if the API refuses or does not answer.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, node_context, run_recorder
from mig_manager.agent.pods import device_advertiser, device_plugin, dra_driver
from mig_manager.core import model, ports, timing
from mig_manager.core.node import (
    client_table,
    clients,
    node_object,
    pod_object,
    strategies,
    well_known,
)

PLUGIN = device_plugin.DevicePlugin()
DRIVER = dra_driver.DraDriver()
ALL: tuple[device_advertiser.Advertiser, ...] = (PLUGIN, DRIVER)
DEPLOY_LABELS = tuple(advertiser.deploy_label for advertiser in ALL)

_PHANTOMS_STAY_S = 30.0  # kubelet reports within 10 s that a stopped plugin's devices are gone

_log = structlog.get_logger()

_Advertisers = frozenset[device_advertiser.Advertiser]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Which advertisers to restart and to verify, after a change or at rest."""

    advertisers: _Advertisers
    """Those that serve the node; if there are none, nothing is restarted or verified."""
    old_uids: frozenset[str] = frozenset()
    """Their pods from before the change: the devices that they advertise are stale."""
    kept_uids: frozenset[str] = frozenset()
    """DRA driver pods that are not restarted: they advertise what the GPUs have."""
    changed: frozenset[str] = frozenset()
    """UUIDs of the changed GPUs: all of their devices must be schedulable."""
    labels_with_pods: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here: worth waiting for its successor."""
    extra_clients: tuple[client_table.ExtraClient, ...] = ()

    @property
    def to_restart(self) -> tuple[device_advertiser.Advertiser, ...]:
        """The advertisers without those whose pods are kept."""
        kept = {DRIVER} if self.kept_uids else set()
        return tuple(advertiser for advertiser in ALL if advertiser in self.advertisers - kept)


def is_advertiser(pod: pod_object.Pod) -> bool:
    """Return whether a pod is the device plugin or the DRA driver."""
    return any(advertiser.owns(pod) for advertiser in ALL)


def owners(pods: Iterable[pod_object.Pod]) -> _Advertisers:
    """Return the advertisers that these pods run."""
    return frozenset(advertiser for pod in pods for advertiser in ALL if advertiser.owns(pod))


def labels_to_await(pods: Iterable[pod_object.Pod]) -> frozenset[str]:
    """Return the deploy labels of the advertisers that run here without one."""
    ungated = (pod for pod in pods if not clients.gated_by((pod,), DEPLOY_LABELS))
    return frozenset(advertiser.deploy_label for advertiser in owners(ungated))


def uids(pods: Iterable[pod_object.Pod]) -> frozenset[str]:
    """Return the UIDs of the device plugin and DRA driver pods."""
    return frozenset(pod.uid for pod in pods if is_advertiser(pod))


def find_awaited(deps: ports.Dependencies, recorder: run_recorder.RunRecorder) -> _Advertisers:
    """Return the advertisers that must serve the node again, even without a pod now."""
    view = deps.node.latest()
    return _with_replaced(deps, _list_awaited(recorder, view.labels), view)


def find_resumed(recorder: run_recorder.RunRecorder, labels: Mapping[str, str]) -> _Advertisers:
    """Return the advertisers that were paused for a change, and may run again."""
    entries = recorder.journal.node
    return frozenset(
        advertiser
        for advertiser in _list_awaited(recorder, labels)
        if advertiser.was_paused(entries)
        and not entries.has_hold_taint
        and advertiser.deploy_label not in entries.paused_labels
    )


def remove_phantoms_and_find(
    attempt: attempts.Attempt, pods: pod_object.Pods, gpus: model.ObservedGpus
) -> _Advertisers:
    """Return the advertisers that serve the node, or must do so again.

    Phantom devices are removed from the node first: they look like a lost plugin's devices.
    """
    view, _ = device_plugin.remove_phantoms(attempt, gpus, pods)
    # Any other value is another program's decision to keep it away, not a failure.
    deployed = frozenset(
        advertiser
        for advertiser in ALL
        if well_known.is_deployed(view.labels.get(advertiser.deploy_label))
    )
    advertisers = owners(pods) | deployed | _list_awaited(attempt.recorder, view.labels)
    return _with_replaced(attempt.deps, advertisers, view)


def _list_awaited(recorder: run_recorder.RunRecorder, labels: Mapping[str, str]) -> _Advertisers:
    return frozenset(advertiser for advertiser in ALL if advertiser.is_awaited(recorder, labels))


def _with_replaced(
    deps: ports.Dependencies, advertisers: _Advertisers, view: node_object.NodeView
) -> _Advertisers:
    """Add a device plugin whose pod is being replaced."""
    if PLUGIN not in advertisers and device_plugin.is_being_replaced(deps, view):
        return advertisers | {PLUGIN}
    return advertisers


def correct_and_check_schedulable(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, changed: frozenset[str] = frozenset()
) -> bool:
    """Correct the node's counts, and return whether it advertises the GPUs' devices.

    All devices of the GPUs with the UUIDs ``changed`` must be healthy. This does not wait.
    """
    pods = attempt.deps.workloads.list()
    restart = Restart(advertisers=remove_phantoms_and_find(attempt, pods, gpus), changed=changed)
    is_complete = not _correct_and_compare(attempt, restart, gpus, pods)
    return is_complete and not PLUGIN.contradicts_label(attempt, gpus, pods)


def find_stale(
    context: node_context.NodeContext,
    pods: pod_object.Pods,
    gpus: model.ObservedGpus,
    *,
    changed: frozenset[str] = frozenset(),
    ignored: frozenset[str] = frozenset(),
) -> tuple[device_advertiser.Advertiser, ...]:
    """Return the advertisers with a ready pod and outdated devices, but none named ``ignored``.

    All devices of the GPUs with the UUIDs ``changed`` must be healthy.
    """
    ready = (
        advertiser
        for advertiser in ALL
        if device_advertiser.is_any_ready(filter(advertiser.owns, pods))
    )
    return tuple(
        advertiser
        for advertiser in ready
        if advertiser.name not in ignored
        and (
            advertiser.is_stale(context.deps, gpus)
            or (changed and advertiser.correct_and_compare(context, gpus, pods, changed))
        )
    )


def restart_stale(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, changed: frozenset[str]
) -> Restart:
    """Restart advertisers with outdated devices, once in all attempts at a request.

    Args:
        attempt: The attempt.
        gpus: The node's GPUs.
        changed: UUIDs of GPUs; all their devices must be healthy.

    Returns:
        The argument of ``wait_schedulable``: their new pods, or pods that are starting.
    """
    pods = attempt.deps.workloads.list()
    present = remove_phantoms_and_find(attempt, pods, gpus)
    again = find_stale(attempt, pods, gpus, changed=changed, ignored=attempt.memory.restarted)
    if PLUGIN not in again and PLUGIN.contradicts_label(attempt, gpus, pods):
        again = (PLUGIN, *again)
    stale = tuple(
        pod for advertiser in again for pod in restart_pods(attempt.deps, advertiser, pods)
    )
    attempt.memory.add_restarted(advertiser.name for advertiser in again)
    return Restart(advertisers=present, old_uids=uids(stale), changed=changed)


def restart_pods(
    deps: ports.Dependencies,
    advertiser: device_advertiser.Advertiser,
    pods: Iterable[pod_object.Pod],
) -> pod_object.Pods:
    """Delete an advertiser's pods, and hide its devices until new pods advertise theirs.

    Kubelet reports only after up to 10 s that a plugin has ended. Pods that are bound until then
    fail, or never start. Returns the advertiser's pods.
    """
    owned = tuple(filter(advertiser.owns, pods))
    delete(deps.workloads, owned)
    if owned:
        advertiser.withdraw(deps)
    return owned


def delete(workloads: ports.Workloads, pods: Iterable[pod_object.Pod]) -> None:
    """Delete the pods that are not terminating already, so that new ones start."""
    for pod in pods:
        if not pod.is_terminating:
            workloads.delete(pod)


def wait_schedulable(
    attempt: attempts.Attempt, restart: Restart, gpus: model.ObservedGpus
) -> None:
    """Wait until device plugin and DRA driver are ready and advertise the GPUs' devices.

    Problems that may need a person are published once.

    Raises:
        NotReadyError: PLUGIN_NOT_READY, NOT_ALLOCATABLE or PHANTOM_DEVICES, with what is missing.
        Superseded: Another layout is requested; the next run verifies this change.
    """
    if not restart.advertisers:
        _log.info("no_device_plugin_found")
        if not _correct_and_compare(attempt, restart, gpus, ()):
            return
    timeout_s = attempt.limits.plugin_timeout_s
    report = _ProblemReport(attempt.recorder, attempt.deps.clock)
    missing, _ = attempt.until_solved(
        lambda pods: report.check(_correct_and_compare(attempt, restart, gpus, pods)), timeout_s
    )
    if missing:
        raise errors.NotReadyError(
            f"{missing.message} (waited {timeout_s:g} s)", reason=missing.reason
        )


def require_served(
    attempt: attempts.Attempt, layouts: Sequence[strategies.GpuLayout], pods: pod_object.Pods
) -> None:
    """Fail if a plugin or driver would exit with the devices that the GPUs will have.

    Raises:
        LayoutError: STRATEGY_MISMATCH.
    """
    labels = attempt.node_labels
    why = DRIVER.why_refused(attempt.recorder, labels, layouts, pods)
    why = why or PLUGIN.why_refused(attempt.plugin_config, labels, layouts, pods)
    if why:
        raise errors.LayoutError(why, reason=reasons.Reason.STRATEGY_MISMATCH)


def _correct_and_compare(
    context: node_context.NodeContext,
    restart: Restart,
    gpus: model.ObservedGpus,
    pods: pod_object.Pods,
) -> errors.NotReadyError | None:
    """Correct the node's counts; return what keeps pods from getting the GPUs' devices.

    None if nothing does.
    """
    new = tuple(pod for pod in pods if pod.uid not in restart.old_uids)
    present = [advertiser for advertiser in ALL if advertiser in restart.advertisers]
    for advertiser in present:
        own_pods = tuple(filter(advertiser.owns, new))
        if not device_advertiser.is_any_ready(own_pods):
            label = context.node_labels.get(advertiser.deploy_label)
            return device_advertiser.not_ready(advertiser, own_pods, gpus, label)
    problems = (
        advertiser.correct_and_compare(context, gpus, new, restart.changed)
        for advertiser in present
    )
    problem = next(filter(None, problems), None)
    if problem is None and PLUGIN not in present:
        return PLUGIN.unknown(context.deps, gpus)
    return problem


class _ProblemReport:
    """Reports problems that may need a person, and ends a wait that only a person can end."""

    def __init__(self, recorder: run_recorder.RunRecorder, clock: timing.Clock) -> None:
        self._recorder = recorder
        self._clock = clock
        self._reported: set[str] = set()
        self._phantoms_since_s: float | None = None

    def check(self, missing: errors.NotReadyError | None) -> errors.NotReadyError | None:
        """Report the problem and return it.

        Raises:
            NotReadyError: PHANTOM_DEVICES that do not disappear.
        """
        if (
            isinstance(missing, device_advertiser.PodWaitsError)
            and missing.why not in self._reported
        ):
            self._reported.add(missing.why)
            self._recorder.enter(model.Phase.VERIFY, missing.message)
        if missing is None or missing.reason is not reasons.Reason.PHANTOM_DEVICES:
            self._phantoms_since_s = None
            return missing
        now_s = self._clock.monotonic()
        if self._phantoms_since_s is None:
            self._phantoms_since_s = now_s
        if now_s - self._phantoms_since_s >= _PHANTOMS_STAY_S:
            raise missing
        return missing
