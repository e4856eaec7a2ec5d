"""One small node in memory, its layouts, and the scenes that the pipeline is played in."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.agent import dependencies, outcomes, reconcile
from mig_manager.catalogue import hardware
from mig_manager.change import instrumentation
from mig_manager.core import model, ports, steps
from mig_manager.core.node import cluster
from mig_manager.core.node import policy as policies
from mig_manager.core.records import status
from tests import fakes

CONFIG = """
version: v1
mig-configs:
  all-disabled:
  - {devices: all, mig-enabled: false}
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  all-balanced:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}
  one-slice-changed:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 4, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}
  all-disabled-first:
  - {devices: [0], mig-enabled: false}
  too-much:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 8}}
  no-such-profile:
  - {devices: all, mig-enabled: true, mig-devices: {1g.99gb: 1}}
  other-gpu:
  - {devices: all, device-filter: "0xFFFF10DE", mig-enabled: true, mig-devices: {1g.5gb: 1}}
"""


BALANCED = {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}


def node(*, layout: str | None = None, gated: bool = True) -> fakes.World:
    """Two A100s with a device plugin; ``layout`` is already in force."""
    product = hardware.find("A100-SXM4-40GB")
    world = fakes.World(gpus=(hardware.template(product, 0), hardware.template(product, 1)))
    world.plugin_is_gated = gated
    if layout:
        run(world, layout)
        world.log.clear()
        world.executed.clear()
        world.states.clear()
        world.events.clear()
        world.messages.clear()
        world.told.clear()
    if gated:
        world.labels[cluster.PLUGIN_DEPLOY_LABEL] = "true"
    if not world.pods:
        world.start_plugin()
    return world


def reconciler(
    world: fakes.World,
    text: str = CONFIG,
    *,
    lock: ports.NodeLock | None = None,
    heals_drift: bool = False,
    is_lenient: bool = False,
    telemetry: instrumentation.Telemetry | None = None,
    **replaced: Any,
) -> reconcile.Reconciler:
    """Return an agent's reconciler; ``replaced`` are dependencies other than the node's own."""
    deps = dependencies.Dependencies(
        gpus=world.hardware,
        node=world.node,
        workloads=world.workloads,
        allocations=world.allocations,
        configs=fakes.FakeConfig(text),
        clock=world.clock,
        extra_clients=fakes.FakeConfig(world.extra_clients) if world.extra_clients else None,
        telemetry=telemetry or instrumentation.Telemetry(),
        lock=lock,
        slots=world.slots,
        boot_id=world.boot_id,
        reset=world.host if world.has_reset else None,
        reboot=world.host if world.may_reboot else None,
        services=world.host if world.services else None,
        service_names=lambda: tuple(world.services),
        device_files=world.host,
        boot_layout=world.host,
        hooks=world.programs if world.hooks else None,
        own_pod_uid="uid-of-the-agent",
    )
    return reconcile.Reconciler(
        dataclasses.replace(deps, **replaced),
        dependencies.Limits(
            drain_timeout_s=20,
            plugin_timeout_s=20,
            monitor_timeout_s=5,
            lock_timeout_s=3,
            heals_drift=heals_drift,
            is_lenient=is_lenient,
            policy=world.policy,
        ),
    )


def run(world: fakes.World, layout: str, text: str = CONFIG) -> outcomes.Outcome:
    wish = fakes.FakeWish(world.clock, replaced=False)
    return reconciler(world, text).run(layout, wish)


def kill_at(world: fakes.World, step: int, layout: str) -> None:
    """Apply a layout with an agent that is killed at a step, counted from 1."""
    seen: list[steps.Step] = []

    def kill(each: steps.Step) -> None:
        seen.append(each)
        if len(seen) == step:
            raise Killed

    world.step_error = kill
    with pytest.raises(Killed):
        run(world, layout)
    world.step_error = lambda _step: None


def device(world: fakes.World, gpu: int, profile: str) -> str:
    """UUID of the first MIG device of a profile."""
    return next(
        ci.uuid
        for gi in world.gpus[gpu].gpu_instances
        for ci in gi.compute_instances
        if str(ci.profile) == profile and ci.uuid
    )


def assert_nothing_taken(world: fakes.World) -> None:
    """Also the plugin's config is what it was, unless the layout that it goes with succeeded."""
    is_applied = world.labels.get(cluster.APPLIED_LABEL) == "one-slice-changed"
    plugin_config = world.labels.get(cluster.PLUGIN_CONFIG_LABEL)
    assert plugin_config in ((None, "sliced") if is_applied else (None, "whole"))
    assert not world.is_unschedulable
    assert not world.has_hold_taint
    assert cluster.PAUSED_VALUE not in world.labels.values()
    left = world.annotations.get(cluster.JOURNAL_ANNOTATION)
    # A hook of the end that failed stays due, and is tried again with the next try at the wish.
    assert (
        left is None
        or dataclasses.replace(status.Journal.from_json(left), exit_hook=False).is_empty
    )
    assert world.owes_exit is (left is not None)
    assert all(is_on is (name != "off.service") for name, is_on in world.services.items())


def refuse(step_type: type, *, times: int) -> Callable[[steps.Step], Exception | None]:
    """Return a driver that refuses the first steps of a kind."""
    left = [times]

    def answer(step: steps.Step) -> Exception | None:
        if isinstance(step, step_type) and left[0]:
            left[0] -= 1
            return errors.HardwareError("no", reason=errors.Reason.INSUFFICIENT_RESOURCES)
        return None

    return answer


BROKEN = {
    "gpus": errors.HardwareError("broken", reason=errors.Reason.NVML_ERROR),
    "host": errors.HostError("broken", reason=errors.Reason.HOST_SERVICE_FAILED),
    "hooks": errors.HostError("broken", reason=errors.Reason.HOOK_FAILED),
    "node": errors.ClusterError("broken", reason=errors.Reason.API_UNAVAILABLE, status=503),
    "workloads": errors.ClusterError("broken", reason=errors.Reason.FORBIDDEN, status=403),
    "allocations": errors.ClusterError("broken", reason=errors.Reason.POD_RESOURCES_UNAVAILABLE),
}


def busy_node() -> fakes.World:
    world = node(layout="all-balanced")
    world.add_pod("victim", devices=frozenset({device(world, 0, "2g.10gb")}))
    world.add_pod("spared", devices=frozenset({device(world, 1, "3g.20gb")}))
    return world


def count_calls(make: Callable[[], fakes.World], layout: str) -> int:
    world = make()
    assert run(world, layout).state is model.State.SUCCESS
    return len(world.log)


def guarded_node() -> fakes.World:
    """A budget guards the pod that must leave, and the owner allows force."""
    world = busy_node()
    world.budgets["victim"] = "budget 'pdb-a' allows no disruption"
    world.policy = policies.Policy(is_forced=True)
    return world


def patient_node() -> fakes.World:
    """Nobody may be evicted; the pod that must leave does so after a while."""
    world = busy_node()
    world.policy = policies.Policy(drain=policies.Drain.NONE)
    (victim,) = (uid for uid, pod in world.pods.items() if pod.name == "victim")

    def finish() -> None:
        if world.clock.now_s > 1 and victim in world.pods:
            world.pods[victim] = dataclasses.replace(world.pods[victim], phase="Succeeded")

    world.clock.on_wait.append(finish)
    return world


def whole_node() -> fakes.World:
    world = busy_node()
    world.policy = policies.Policy(drain=policies.Drain.NODE)
    return world


GFD, DCGM, EXPORTER = (
    cluster.DEPLOY_LABEL_PREFIX + name
    for name in ("gpu-feature-discovery", "dcgm", "dcgm-exporter")
)


def monitored_node() -> fakes.World:
    """The operator's monitors and its validator; one monitor is deployed nowhere."""
    world = busy_node()
    world.labels |= dict.fromkeys((GFD, DCGM, EXPORTER), "true")
    world.deploy_daemons |= {GFD: True, EXPORTER: True}
    world.loose_daemons.add("nvidia-operator-validator")
    world.live()
    return world


EXTRA_CLIENTS = """
version: v1
clients:
- labels: {app: watcher}
- labels: {app: sampler}
  namespace: default
  deploy-label: nvidia.com/gpu.deploy.sampler
"""


SAMPLER = cluster.DEPLOY_LABEL_PREFIX + "sampler"


def watched_node() -> fakes.World:
    """The owner's own daemons, one that a label places and one that none does."""
    world = busy_node()
    world.extra_clients = EXTRA_CLIENTS
    world.labels[SAMPLER] = "true"
    world.deploy_daemons[SAMPLER] = True
    world.loose_daemons.add("watcher")
    world.live()
    return world


def sharing_node() -> fakes.World:
    world = busy_node()
    world.labels[cluster.PLUGIN_CONFIG_LABEL] = "whole"
    world.policy = policies.Policy(plugin_configs={"one-slice-changed": "sliced"})
    return world


def hosted_node() -> fakes.World:
    """Services of the host hold the GPUs; one of them does not run."""
    world = busy_node()
    world.services |= {"dcgm.service": True, "nvsm.service": True, "off.service": False}
    return world


def resetting_node() -> fakes.World:
    """Without a reset no switch of MIG mode takes effect."""
    world = node()
    world.mode_waits = world.has_reset = True
    return world


HOOKS = """
version: v1
hooks:
  apply-start: [{command: start}]
  pre-apply-mode: [{command: mode}]
  pre-apply-config: [{command: config}]
  apply-exit: [{command: exit}]
"""


def hooked(world: fakes.World) -> fakes.World:
    world.hooks = HOOKS
    return world


_SWEPT_BY_DEFAULT = ("first-layout", "one-slice-on-a-busy-node", "host-services", "hooks")

SCENARIOS: dict[str, tuple[Callable[[], fakes.World], str]] = {
    "first-layout": (node, "all-1g.5gb"),
    "first-layout-ungated": (lambda: node(gated=False), "all-1g.5gb"),
    "one-slice-on-a-busy-node": (busy_node, "one-slice-changed"),
    "mode-off": (busy_node, "all-disabled"),
    "by-force": (guarded_node, "one-slice-changed"),
    "nobody-is-evicted": (patient_node, "one-slice-changed"),
    "whole-node": (whole_node, "one-slice-changed"),
    "monitors": (monitored_node, "one-slice-changed"),
    "extra-clients": (watched_node, "one-slice-changed"),
    "host-services": (hosted_node, "one-slice-changed"),
    "hooks": (lambda: hooked(hosted_node()), "one-slice-changed"),
    "hooks-of-the-mode": (lambda: hooked(node()), "all-1g.5gb"),
    "reset": (resetting_node, "all-1g.5gb"),
    "plugin-config": (sharing_node, "one-slice-changed"),
}


def fakes_error(make: Callable[[], fakes.World], layout: str, index: int) -> Exception:
    world = make()
    run(world, layout)
    if world.log[index] == "host.save":
        return errors.ConfigError("broken")
    return BROKEN[world.log[index].partition(".")[0]]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


SWEPT = [
    pytest.param(name, marks=() if name in _SWEPT_BY_DEFAULT else pytest.mark.slow)
    for name in SCENARIOS
]
"""The scenes for tests that play each of them dozens of times."""
