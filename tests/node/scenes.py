"""One small node in memory, its layouts, and the scenes that the pipeline is played in."""

import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import attempts, drift, jobs, outcomes, publish, reconcile, settings
from mig_manager.catalogue import hardware
from mig_manager.core import model, ports, profile_name, steps
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import claims, client_table, well_known
from mig_manager.core.records import journals
from tests import changes
from tests.node import fakes, gpu_values, judging, port_calls

CONFIG = (
    changes.document(("all-disabled", "all-1g.5gb", "all-balanced", "one-slice-changed"))
    + """\
  all-disabled-first:
  - {devices: [0], mig-enabled: false}
  too-much:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 8}}
  no-such-profile:
  - {devices: all, mig-enabled: true, mig-devices: {1g.99gb: 1}}
  other-gpu:
  - {devices: all, device-filter: "0xFFFF10DE", mig-enabled: true, mig-devices: {1g.5gb: 1}}
"""
)


BALANCED = changes.counts(*changes.gpus_with("all-balanced", 1)) or {}


def has_layout(rig: fakes.NodeRig, layout: str) -> bool:
    """Return whether the GPUs have exactly what a layout lists, and no mode is pending."""
    gpus, wanted = changes.described(rig.gpus), changes.gpus_with(layout)
    return [*map(changes.counts, gpus)] == [*map(changes.counts, wanted)]


def assert_says_the_truth(rig: fakes.NodeRig) -> None:
    """The label names a layout that is active, or there is none."""
    applied = rig.labels.get(well_known.APPLIED_LABEL)
    assert applied is None or has_layout(rig, applied)


def is_as_before(rig: fakes.NodeRig, before: Iterable[model.Gpu | model.GpuSnapshot]) -> bool:
    """Return whether GPUs have the modes, instances and placements that they had."""
    return gpu_values.geometry(before).items() <= gpu_values.geometry(rig.gpus).items()


def node(*, layout: str | None = None, gated: bool = True) -> fakes.NodeRig:
    """Two A100s with a device plugin; ``layout`` is already active."""
    original = _node(layout=layout, gated=gated)
    # The GPUs are immutable.
    return copy.deepcopy(original, {id(original.gpus): original.gpus})


@functools.cache
def _node(*, layout: str | None, gated: bool) -> fakes.NodeRig:
    product = hardware.find("A100-SXM4-40GB")
    rig = fakes.NodeRig(gpus=(hardware.template(product, 0), hardware.template(product, 1)))
    rig.plugin.is_gated = gated
    if layout:
        run(rig, layout)
        rig.forget_past()
    if gated:
        rig.labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    if not rig.pods:
        rig.start_plugin()
    return rig


TIMEOUTS = {
    "drain_timeout_s": 20,
    "plugin_timeout_s": 20,
    "monitor_timeout_s": 5,
    "lock_timeout_s": 3,
}


def dependencies(rig: fakes.NodeRig, text: str = CONFIG) -> ports.Dependencies:
    """Return the dependencies of an agent on the node."""
    return ports.Dependencies(
        gpus=rig.hardware,
        node=rig.node,
        workloads=rig.workloads,
        allocations=rig.allocations,
        slices=rig.published,
        configs=fakes.FakeConfig(text),
        clock=rig.clock,
        extra_clients=lambda: (
            client_table.parse(rig.extra_clients, source="test.yaml") if rig.extra_clients else ()
        ),
        lock=fakes.FakeLock(),
        slots=rig.slots,
        boot_id=rig.host.boot_id,
        reset=rig.machine if rig.resets.are_available else None,
        reboot=rig.machine if rig.host.may_reboot else None,
        services=rig.machine if rig.host.services else None,
        service_names=lambda: tuple(rig.host.services),
        refresh_files=rig.machine.refresh,
        boot_layout=rig.machine,
        request_file=rig.request_file,
        hooks=rig.programs if rig.hooks.text else None,
        own_pod_uid="uid-of-the-agent",
    )


def job(
    rig: fakes.NodeRig, limits: settings.Limits, cancel: ports.Cancellation, **replaced: Any
) -> jobs.Job:
    """Return an attempt at a layout, for a part of a run; ``replaced`` as for ``reconciler``."""
    deps = dataclasses.replace(dependencies(rig), **replaced)
    publisher = publish.Publisher(deps.node, deps.request_file)
    memory = jobs.AttemptMemory()
    shared = jobs.Shared(deps=deps, limits=limits, publisher=publisher, memory=memory)
    request = jobs.Request(config=LAYOUT)
    with attempts.Attempts(shared, lambda _gpus: None).begin(request, cancel) as attempt:
        return attempt


class AgentInMemory(reconcile.Reconciler):
    """A reconciler that also takes a request as the layout's name, and its other members."""

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        super().__init__(deps, limits)
        self.ended: list[outcomes.Outcome] = []
        """Of its runs, those that ended."""

    def recover(
        self,
        request: jobs.Request | str | None,
        custom: custom_layouts.Custom | None = None,
    ) -> None:
        super().recover(_requested(request, custom=custom))

    def run(
        self, request: jobs.Request | str, cancel: ports.Cancellation, **members: Any
    ) -> outcomes.Outcome:
        outcome = super().run(_requested(request, **members), cancel)
        self.ended.append(outcome)
        return outcome

    def check_drift(
        self,
        request: jobs.Request | str,
        outcome: outcomes.Outcome,
        custom: custom_layouts.Custom | None = None,
    ) -> drift.Action:
        return super().check_drift(_requested(request, custom=custom), outcome)


def _requested(request: jobs.Request | str | None, **members: Any) -> jobs.Request:
    if isinstance(request, jobs.Request):
        return request
    return jobs.Request(config=request or "", **members)


def reconciler(
    rig: fakes.NodeRig,
    text: str = CONFIG,
    *,
    heals_drift: bool = False,
    is_lenient: bool = False,
    limits: Mapping[str, Any] | None = None,
    **replaced: Any,
) -> AgentInMemory:
    """Return an agent's reconciler.

    ``limits`` are further ones, ``replaced`` are dependencies other than the node's own.
    """
    return AgentInMemory(
        dataclasses.replace(dependencies(rig, text), **replaced),
        settings.Limits(
            heals_drift=heals_drift,
            is_lenient=is_lenient,
            policy=rig.policy,
            **({**TIMEOUTS, **(limits or {})}),
        ),
    )


LAYOUT = "one-slice-changed"
"""For it the device of the pod ``affected`` on a busy node goes, and nothing else."""


def run(
    rig: fakes.NodeRig,
    layout: str = LAYOUT,
    text: str = CONFIG,
    *,
    by: AgentInMemory | None = None,
    request: fakes.FakeRequest | None = None,
    **options: Any,
) -> outcomes.Outcome:
    """Apply a layout, with an agent of its own if none is given."""
    agent = by or reconciler(rig, text)
    return agent.run(layout, request or fakes.FakeRequest(rig.clock), **options)


def assert_ends(
    rig: fakes.NodeRig,
    reason: errors.Reason,
    *texts: str,
    layout: str = LAYOUT,
    **options: Any,
) -> outcomes.Outcome:
    """Apply a layout; check reason and message, and that the node is restored."""
    outcome = run(rig, layout, **options)
    assert outcome.reason is reason, outcome.message
    for text in texts:
        assert text in outcome.message
    assert_restored(rig)
    return outcome


def assert_superseded(
    rig: fakes.NodeRig,
    layout: str = LAYOUT,
    *,
    when: Callable[[], bool] = lambda: False,
    **options: Any,
) -> None:
    """Apply a layout until its request ends; check that the node is restored."""
    request = fakes.FakeRequest(rig.clock, **options)
    request.ends_when = when
    with pytest.raises(errors.Superseded):
        run(rig, layout, request=request)
    assert_restored(rig, is_stopped=not options.get("replaced"))


def resume(rig: fakes.NodeRig, layout: str, text: str = CONFIG) -> outcomes.Outcome:
    """Take over from a killed agent, and apply a layout."""
    successor = reconciler(rig, text)
    successor.recover(layout)
    return successor.run(layout, fakes.FakeRequest(rig.clock))


def undo(rig: fakes.NodeRig) -> bool:
    """Take over from a killed agent where the label was removed; return whether to retry."""
    successor = reconciler(rig)
    successor.recover(None)
    return successor.rest()


def kill_at(rig: fakes.NodeRig, step: int, layout: str = LAYOUT, **options: Any) -> None:
    """Apply a layout with an agent that is killed at a step, counted from 1."""
    numbers = itertools.count(1)

    def kill(_step: steps.Step) -> None:
        if next(numbers) == step:
            raise Killed

    rig.driver.step_error = kill
    with pytest.raises(Killed):
        run(rig, layout, **options)
    rig.driver.step_error = lambda _step: None


def kill_when(
    rig: fakes.NodeRig,
    is_due: Callable[[], bool],
    act: Callable[[fakes.NodeRig], object] = run,
) -> None:
    """Kill the agent that acts, in its first call at which a condition holds."""

    def kill() -> None:
        if is_due():
            raise Killed

    rig.on_call = kill
    with pytest.raises(Killed):
        act(rig)
    rig.on_call = lambda: None


def killed(
    make: Callable[[], fakes.NodeRig], index: int, act: Callable[[fakes.NodeRig], object] = run
) -> tuple[fakes.NodeRig, tuple[model.Gpu, ...]]:
    """Return a node whose agent was killed in its call ``index``, and the GPUs before."""
    rig = make()
    before = rig.gpus
    rig.failing = {index: Killed()}
    with pytest.raises(Killed):
        act(rig)
    rig.failing = {}
    return rig, before


def at_rest(
    layout: str, *, rig: fakes.NodeRig | None = None, **options: Any
) -> tuple[fakes.NodeRig, AgentInMemory, outcomes.Outcome]:
    """Return a node whose layout is active, its agent with these options, and the last outcome."""
    rig = rig or node(layout=layout)
    agent = reconciler(rig, **options)
    ended = run(rig, layout, by=agent)
    rig.forget_past()
    return rig, agent, ended


def moments(
    make: Callable[[], fakes.NodeRig],
    act: Callable[[fakes.NodeRig], object] = run,
    *,
    is_alike: Callable[[str], bool] = port_calls.READS.__contains__,
) -> Iterator[int]:
    """Yield the first call of an undisturbed run, and each after a wait or a call not alike."""
    rig, times_s = make(), list[float]()
    rig.on_call = lambda: times_s.append(rig.clock.now_s)
    act(rig)
    for index, now_s in enumerate(times_s):
        if not (index and is_alike(rig.log[index - 1]) and now_s == times_s[index - 1]):
            yield index


def kills(
    make: Callable[[], fakes.NodeRig], act: Callable[[fakes.NodeRig], object] = run
) -> Iterator[tuple[int, fakes.NodeRig, tuple[model.Gpu, ...]]]:
    """Yield what ``killed`` returns, for each state that an undisturbed run's node has."""
    for index in moments(make, act):
        yield (index, *killed(make, index, act))


def device(rig: fakes.NodeRig, gpu: int, profile: str) -> str:
    """UUID of the first MIG device of a profile."""
    return next(
        ci.uuid
        for gi in rig.gpus[gpu].gpu_instances
        for ci in gi.compute_instances
        if str(ci.profile) == profile and ci.uuid
    )


def assert_restored(
    rig: fakes.NodeRig, *, is_stopped: bool = False, is_in_drain: bool = False
) -> None:
    """Also the plugin's config is what it was, unless the layout that it goes with succeeded.

    A stopped agent, or one in a drain, may have left the proof of the plugin's devices to the next
    attempt.
    """
    assert remaining(rig, is_stopped=is_stopped, is_in_drain=is_in_drain) == []


def remaining(
    rig: fakes.NodeRig,
    *,
    is_stopped: bool = False,
    is_in_drain: bool = False,
    is_cordoned: bool = False,
    deployed: Mapping[str, str] | None = None,
) -> list[str]:
    """Return what a change has left on the node; nothing, if all is well."""
    view = rig.node.latest(is_at_rest=True)
    journal = journals.parse_or_none(view.annotations.get(well_known.JOURNAL_ANNOTATION))
    is_applied = rig.labels.get(well_known.APPLIED_LABEL) == "one-slice-changed"
    config = rig.labels.get(well_known.PLUGIN_CONFIG_LABEL)
    is_config_well = config in (None, "sliced" if is_applied else "whole")
    services = [
        name for name, is_on in rig.host.services.items() if is_on is (name == "off.service")
    ]
    # An exit hook that failed stays pending, and runs again at the next attempt.
    has_exit_hook = journal is not None and journal.exit_hook
    owed = (
        *("exit_hook", "persistent_gpus"),
        # After a failure the next run refreshes the device files.
        *(("stale_files",) if rig.labels.get(well_known.STATE_LABEL) != "success" else ()),
        *(judging.PROOF if is_stopped or is_in_drain else ()),
        *(("hold_taint",) if is_in_drain else ()),
    )
    return [
        *judging.remaining(view, *owed, is_cordoned=is_cordoned, deployed=deployed),
        *([] if is_config_well else [f"config {config}"]),
        *([f"services {services}"] if services else []),
        *(["exit hook"] if rig.hooks.pending_exit is not has_exit_hook else []),
    ]


def assert_restored_or_in_drain(rig: fakes.NodeRig, before_failure: Iterable[str]) -> None:
    """Once a drain has removed pods, the taint stays until the next attempt, and nothing else."""
    if rig.has_hold_taint:
        assert {"workloads.evict", "workloads.delete"} & set(before_failure)
        status = json.loads(rig.annotations[well_known.STATUS_ANNOTATION])
        assert status["phase"] in ("Drain", "Pause")
    assert_restored(rig, is_in_drain=rig.has_hold_taint)


def refuse(step_type: type, *, times: int) -> Callable[[steps.Step], Exception | None]:
    """Return a driver that refuses the first steps of a kind."""
    remaining = [times]

    def answer(step: steps.Step) -> Exception | None:
        if isinstance(step, step_type) and remaining[0]:
            remaining[0] -= 1
            return errors.HardwareError("no", reason=errors.Reason.INSUFFICIENT_RESOURCES)
        return None

    return answer


BROKEN = {
    "gpus": errors.HardwareError("broken", reason=errors.Reason.NVML_ERROR),
    "boot_layout": errors.ConfigError("broken"),
    "request_file": errors.ConfigError("broken"),
    **dict.fromkeys(
        ("services", "reset", "reboot", "refresh_files"),
        errors.HostError("broken", reason=errors.Reason.HOST_SERVICE_FAILED),
    ),
    "hooks": errors.HostError("broken", reason=errors.Reason.HOOK_FAILED),
    "node": errors.ClusterError("broken", reason=errors.Reason.API_UNAVAILABLE, status=503),
    "workloads": errors.ClusterError("broken", reason=errors.Reason.FORBIDDEN, status=403),
    "allocations": errors.KubeletError("broken"),
    "slices": errors.ClusterError("broken", reason=errors.Reason.API_UNAVAILABLE, status=503),
}


def busy_node() -> fakes.NodeRig:
    rig = node(layout="all-balanced")
    rig.add_pod("affected", devices=frozenset({device(rig, 0, "2g.10gb")}))
    rig.add_pod("spared", devices=frozenset({device(rig, 1, "3g.20gb")}))
    return rig


DRA_MONITORS = tuple(
    well_known.DEPLOY_LABEL_PREFIX + name for name in ("dcgm-dra", "dcgm-exporter-dra")
)


def dra_node(*, gated: bool = True) -> fakes.NodeRig:
    """The DRA driver serves the node, and two pods have a device of GPU 0 by a claim."""
    rig = node(layout="all-1g.5gb")
    rig.pods.clear()
    rig.schedulable = {}
    del rig.labels[well_known.PLUGIN_DEPLOY_LABEL]
    rig.dra_driver.is_installed, rig.dra_driver.is_gated = True, gated
    if gated:
        rig.labels |= dict.fromkeys((claims.DEPLOY_LABEL, *DRA_MONITORS), "true")
        rig.daemons.deployed |= dict.fromkeys(DRA_MONITORS, True)
    rig.live()
    for name, start in (("low", 0), ("high", 6)):
        rig.add_pod(name, has_claims=True, claimed_ids=frozenset({device_at(rig, start)}))
    return rig


def device_at(rig: fakes.NodeRig, start: int) -> str:
    """UUID of the MIG device of GPU 0 that begins at a memory slice."""
    (found,) = (gi for gi in rig.gpus[0].gpu_instances if gi.placement.start == start)
    return found.compute_instances[0].uuid or ""


def calls(make: Callable[[], fakes.NodeRig], layout: str) -> list[str]:
    """Return the port calls of an undisturbed run."""
    rig = make()
    assert run(rig, layout).state is model.State.SUCCESS
    return rig.log


def broken(call: str) -> Exception:
    """Return what a port call raises that fails."""
    return BROKEN[call.partition(".")[0]]


def hosted_node() -> fakes.NodeRig:
    """Host services use the GPUs; one of them does not run."""
    rig = busy_node()
    rig.host.services |= {"dcgm.service": True, "nvsm.service": True, "off.service": False}
    return rig


HOOKS = """
version: v1
hooks:
  apply-start: [{command: start}]
  pre-apply-mode: [{command: mode}]
  pre-apply-config: [{command: config}]
  apply-exit: [{command: exit}]
"""


def hooked(rig: fakes.NodeRig) -> fakes.NodeRig:
    rig.hooks.text = HOOKS
    return rig


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def add_pod_on_foreign_instances(rig: fakes.NodeRig) -> None:
    """Create instances outside the layout, and a pod that uses one."""
    wanted = model.DesiredGpu.of(model.MigMode.ENABLED, {profile_name.parse("1g.5gb"): 7})
    rig.gpus = (*gpu_values.brought_to(rig.gpus[:1], wanted), *rig.gpus[1:])
    rig.add_pod("foreign", devices=frozenset(rig.gpus[0].mig_uuids))
