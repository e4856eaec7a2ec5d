"""A node in memory whose GPUs have a fault that a reset cures, and its agent."""

from typing import Any

from mig_manager import errors, reasons
from mig_manager.agent import outcomes
from mig_manager.agent.drift import actions
from mig_manager.core import model
from mig_manager.core.settings import node_settings
from tests.pipeline import agent_loop
from tests.rigs.node import agents, fakes, gpu_values, inboxes, node_rig, nodes

RESET = {"repair": node_settings.RepairPolicy.RESET}
REFUSED = errors.HostError(
    "GPU 0 can only be reset together with GPU 1", reason=reasons.Reason.RESET_REQUIRED
)


def faulty_node(*indices: int) -> node_rig.NodeRig:
    """Return a busy node whose GPUs with these indices (0 if none is named) await a reset."""
    rig = nodes.busy_node()
    break_gpus(rig, *(indices or (0,)))
    return rig


def stuck_node() -> node_rig.NodeRig:
    """Return a busy node with a verified layout, whose GPU 0 now answers only to a reset."""
    rig = nodes.busy_node()
    agents.run(rig, "all-balanced", by=agent_of(rig))
    break_gpus(rig, 0)
    rig.driver.lost.add(rig.gpus[0].uuid)
    rig.forget_past()
    return rig


def break_gpus(rig: node_rig.NodeRig, *indices: int) -> None:
    rig.gpus = gpu_values.with_action(rig.gpus, model.RecoveryAction.GPU_RESET, *indices)


def silence_kubelet(rig: node_rig.NodeRig) -> None:
    rig.kubelet.is_silent = True


def agent_of(rig: node_rig.NodeRig, **options: Any) -> agents.AgentInMemory:
    return agents.new_agent(rig, settings=options.pop("settings", RESET), **options)


def begun(rig: node_rig.NodeRig, **options: Any) -> agents.AgentInMemory:
    """Return an agent that has verified the layout, and runs the repair next."""
    agent = agent_of(rig, **options)
    outcome = agents.run(rig, "all-balanced", by=agent)
    assert agent.check_drift("all-balanced", outcome) is actions.Action.RUN
    return agent


def serve(rig: node_rig.NodeRig, by: agents.AgentInMemory | None = None) -> outcomes.Outcome:
    """Let an agent take over, and repair what it finds at the next drift check."""
    source = fakes.FakeTextSource(agents.LAYOUTS_TEXT)
    agent = by or agent_of(rig, layout_source=source)
    agent_loop.request(rig, "all-balanced")
    pauses_s: list[float] = []

    def check(pause: inboxes.Pause) -> None:
        if pauses_s or not pause.is_at_rest:
            raise agent_loop.EndOfPause
        pauses_s.append(pause.seconds)
        rig.clock.wait(pause.seconds)

    outcome = agent_loop.run_agent(rig, agent, source, check)
    assert outcome is not None
    return outcome


def resets(rig: node_rig.NodeRig) -> int:
    return rig.log.count("reset.reset")


def message(rig: node_rig.NodeRig) -> str:
    assert rig.node_object.recovery_condition is not None
    return rig.node_object.recovery_condition["message"]


def request_other(
    rig: node_rig.NodeRig, by: agents.AgentInMemory, *, attempt: int = 1
) -> outcomes.Outcome:
    return agents.run(rig, "all-1g.5gb", by=by, is_new=attempt == 1, attempt=attempt)
