"""Check whether the GPUs' devices are schedulable, wait for that, and remove obstacles.

Every function with ports or an attempt raises ClusterError if the API refuses or does not answer.
"""

import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, node_context, run_recorder
from mig_manager.agent.pods import device_advertiser, node_advertisers
from mig_manager.core import model, timing
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import pod_object
from mig_manager.core.records import run_status

_PHANTOMS_STAY_S = 30.0  # kubelet reports within 10 s that a stopped plugin's devices are gone

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAdvertisers:
    """Which advertisers must advertise the GPUs' devices."""

    advertisers: node_advertisers.Advertisers
    """Those that serve the node; if there are none, no device is verified."""
    old_uids: frozenset[str] = frozenset()
    """Their pods that must be replaced first: the devices that they advertise are stale."""
    changed: frozenset[str] = frozenset()
    """UUIDs of the changed GPUs: all of their devices must be schedulable."""


def correct_and_check_schedulable(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, changed: frozenset[str] = frozenset()
) -> bool:
    """Correct the node's counts, and return whether it advertises the GPUs' devices.

    All devices of the GPUs with the UUIDs ``changed`` must be healthy. This does not wait.
    """
    pods = attempt.deps.workloads.list()
    expected = ExpectedAdvertisers(
        advertisers=node_advertisers.remove_phantoms_and_find(attempt, pods, gpus), changed=changed
    )
    is_complete = not _correct_and_compare(attempt, expected, gpus, pods)
    return is_complete and not node_advertisers.PLUGIN.contradicts_label(attempt, gpus, pods)


def find_stale(
    context: node_context.NodeContext,
    pods: pod_object.Pods,
    gpus: model.ObservedGpus,
    *,
    changed: frozenset[str] = frozenset(),
    ignored: frozenset[str] = frozenset(),
) -> tuple[device_advertiser.Advertiser, ...]:
    """Return the advertisers with a ready pod and stale devices, but none named ``ignored``.

    All devices of the GPUs with the UUIDs ``changed`` must be healthy.
    """
    ready = (
        advertiser
        for advertiser in node_advertisers.ALL
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
) -> ExpectedAdvertisers:
    """Restart advertisers with stale devices, once in all attempts at a request.

    Args:
        attempt: The attempt.
        gpus: The node's GPUs.
        changed: UUIDs of GPUs; all their devices must be healthy.

    Returns:
        The argument of ``wait_schedulable``: their new pods, or pods that are starting.
    """
    pods = attempt.deps.workloads.list()
    present = node_advertisers.remove_phantoms_and_find(attempt, pods, gpus)
    again = find_stale(attempt, pods, gpus, changed=changed, ignored=attempt.memory.restarted)
    if node_advertisers.PLUGIN not in again and node_advertisers.PLUGIN.contradicts_label(
        attempt, gpus, pods
    ):
        again = (node_advertisers.PLUGIN, *again)
    stale = tuple(
        pod
        for advertiser in again
        for pod in node_advertisers.restart_pods(attempt.deps, advertiser, pods)
    )
    attempt.memory.add_restarted(advertiser.name for advertiser in again)
    return ExpectedAdvertisers(
        advertisers=present, old_uids=node_advertisers.uids(stale), changed=changed
    )


def wait_schedulable(
    attempt: attempts.Attempt, expected: ExpectedAdvertisers, gpus: model.ObservedGpus
) -> None:
    """Wait until device plugin and DRA driver are ready and advertise the GPUs' devices.

    Problems that may need a person are published once.

    Raises:
        NotReadyError: PLUGIN_NOT_READY, NOT_ALLOCATABLE or PHANTOM_DEVICES, with what is missing.
        Superseded: Another layout is requested; the next run verifies this change.
    """
    if not expected.advertisers:
        _log.info("no_device_plugin_found")
        if not _correct_and_compare(attempt, expected, gpus, ()):
            return
    timeout_s = attempt.settings.plugin_timeout_s
    report = _ProblemReport(attempt.recorder, attempt.deps.clock)
    missing, _ = attempt.until_solved(
        lambda pods: report.check(_correct_and_compare(attempt, expected, gpus, pods)), timeout_s
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
    for advertiser in node_advertisers.ALL:
        if why := advertiser.why_refused(attempt, layouts, pods):
            raise errors.LayoutError(why, reason=reasons.Reason.STRATEGY_MISMATCH)


def _correct_and_compare(
    context: node_context.NodeContext,
    expected: ExpectedAdvertisers,
    gpus: model.ObservedGpus,
    pods: pod_object.Pods,
) -> errors.NotReadyError | None:
    """Correct the node's counts; return what keeps pods from getting the GPUs' devices.

    None if nothing does.
    """
    new = tuple(pod for pod in pods if pod.uid not in expected.old_uids)
    present = [
        advertiser for advertiser in node_advertisers.ALL if advertiser in expected.advertisers
    ]
    for advertiser in present:
        own_pods = tuple(filter(advertiser.owns, new))
        if not device_advertiser.is_any_ready(own_pods):
            label = context.node_labels.get(advertiser.deploy_label)
            return device_advertiser.not_ready(advertiser, own_pods, gpus, label)
    problems = (
        advertiser.correct_and_compare(context, gpus, new, expected.changed)
        for advertiser in present
    )
    problem = next(filter(None, problems), None)
    if problem is None and node_advertisers.PLUGIN not in present:
        return node_advertisers.PLUGIN.why_unrestartable(context.deps, gpus)
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
            self._recorder.enter(run_status.Phase.VERIFY, missing.message)
        if missing is None or missing.reason is not reasons.Reason.PHANTOM_DEVICES:
            self._phantoms_since_s = None
            return missing
        now_s = self._clock.monotonic()
        if self._phantoms_since_s is None:
            self._phantoms_since_s = now_s
        if now_s - self._phantoms_since_s >= _PHANTOMS_STAY_S:
            raise missing
        return missing
