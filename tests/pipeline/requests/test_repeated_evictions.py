"""A change that fails after each of its drains: how often it evicts."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from mig_manager import errors
from mig_manager.core import steps
from mig_manager.reasons import Reason
from tests.rigs.node import agents, call_errors, ends, node_rig, nodes, strikes


def broken_change(rig: node_rig.NodeRig) -> contextlib.AbstractContextManager[None]:
    """Let the driver refuse the change, and not the rollback."""
    return rig.failures.adding(
        steps.CreateGpuInstance,
        errors.HardwareError("the driver refuses", reason=Reason.VERIFY_FAILED),
        when=lambda: str(rig.driver.next_step.profile) == "1g.5gb",
    )


@contextlib.contextmanager
def broken_service(rig: node_rig.NodeRig) -> Iterator[None]:
    rig.host.services["dcgm.service"] = True
    rig.host.broken_services.add("dcgm.service")
    yield
    rig.host.broken_services.clear()


@contextlib.contextmanager
def broken_hook(rig: node_rig.NodeRig) -> Iterator[None]:
    nodes.add_hooks(rig).hooks.broken.add("config")
    yield
    rig.hooks.broken.clear()


def restart_pod(rig: node_rig.NodeRig, device: str) -> None:
    """Start the pod again if it was evicted."""
    if "affected" not in rig.pods.names:
        rig.pods.add("affected", devices=frozenset({device}))


def reboot(rig: node_rig.NodeRig) -> None:
    rig.host.boot_id = "boot-2"


class Remedy(NamedTuple):
    """What lets a change evict pods again, or what it no longer needs to evict."""

    act: Callable[[node_rig.NodeRig], object] = lambda _rig: None
    is_new: bool = False  # whether it is a new label
    evictions: int = 4  # as many as there were in the end


REMEDIES = {
    "pod ends": Remedy(lambda rig: rig.pods.remove(rig.pods.uid_of("affected")), evictions=3),
    "label": Remedy(is_new=True),
    "reboot": Remedy(reboot),
}


@pytest.mark.parametrize(
    ("broken", "problem", "remedy", "is_restarted"),
    [
        (broken_change, "the driver refuses", "pod ends", False),
        (broken_change, "the driver refuses", "pod ends", True),
        (broken_change, "the driver refuses", "label", False),
        (broken_change, "the driver refuses", "label", True),
        (broken_change, "the driver refuses", "reboot", True),
        (broken_service, "dcgm.service does not answer", "pod ends", True),
        (broken_hook, "config failed", "label", False),
    ],
)
def test_a_change_that_always_fails_after_its_drain_soon_evicts_no_pod(
    broken: Callable[[node_rig.NodeRig], contextlib.AbstractContextManager[None]],
    problem: str,
    remedy: str,
    *,
    is_restarted: bool,
) -> None:
    rig = nodes.busy_node()
    device = nodes.device(rig, 0, "2g.10gb")
    with broken(rig):
        agent = agents.new_agent(rig)
        for attempt in range(1, 7):
            assert agents.run(rig, "one-slice-changed", by=agent, attempt=attempt).should_retry
            restart_pod(rig, device)
        outcome = agents.run(rig, "one-slice-changed", by=agent, attempt=7)
    assert outcome.should_retry
    assert rig.log.count("workloads.evict") == 3
    assert "3 changes to layout" in outcome.message
    assert problem in outcome.message
    assert "default/affected" in outcome.message

    act, is_new, evictions = REMEDIES[remedy]
    act(rig)
    if is_restarted:
        agent = agents.start(rig, "one-slice-changed")
    ends.run_to(rig, "one-slice-changed", Reason.APPLIED, by=agent, is_new=is_new)
    assert "affected" not in rig.pods.names
    assert rig.log.count("workloads.evict") == evictions


@pytest.mark.parametrize(
    "strike",
    [
        lambda rig: rig.lost_answers.adding("workloads.evict", call_errors.broken("node")),
        lambda rig: rig.lost_answers.adding("workloads.evict", strikes.Killed()),
        lambda rig: rig.failures.adding(steps.DestroyComputeInstance, strikes.Killed()),
    ],
)
def test_an_eviction_counts_though_its_answer_is_lost_or_the_agent_killed(
    strike: Callable[[node_rig.NodeRig], contextlib.AbstractContextManager[None]],
) -> None:
    rig = nodes.busy_node()
    device = nodes.device(rig, 0, "2g.10gb")
    with broken_change(rig):
        for _ in range(5):
            agent = agents.start(rig, "one-slice-changed")
            with contextlib.suppress(strikes.Killed), strike(rig):
                agents.run(rig, "one-slice-changed", by=agent)
            if rig.node_object.has_reconfiguring_taint:
                agents.resume(rig, "one-slice-changed")
            restart_pod(rig, device)

    assert rig.log.count("workloads.evict") == 3
