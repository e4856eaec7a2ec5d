"""Events of GPUs that a person simulates: a reboot, a lost GPU, a fault."""

import pathlib

from mig_manager import errors
from mig_manager.adapters.nvml import observation
from mig_manager.sandbox.driver import state_file

_REBOOT, _LOST = "reboot", "lost"


def simulate(event: str, path: pathlib.Path | None) -> None:
    """Let an event happen to the GPUs in a state file.

    Args:
        event: ``reboot``, ``INDEX=lost``, or ``INDEX=ACTION`` with a recovery action.
        path: The state file; None: the GPUs are real.

    Raises:
        UsageError: The event is malformed, or the GPUs are real.
    """
    if path is None:
        raise errors.UsageError(
            "--simulate-event is for simulated GPUs; name them with --simulate or --simulate-state"
        )
    state = state_file.SharedState(path)
    index, _, fault = event.partition("=")
    actions = {each.value: number for number, each in enumerate(observation.RECOVERY_ACTIONS)}
    indices = {str(board.index): board.index for board in state.boards}
    if event == _REBOOT:
        state.reboot()
    elif index in indices and fault == _LOST:
        state.lose_gpu(indices[index])
    elif index in indices and fault in actions:
        state.fail_gpu(indices[index], action=actions[fault])
    else:
        raise errors.UsageError(
            f"--simulate-event {event!r} is neither {_REBOOT} nor INDEX=EVENT, with a GPU from 0 "
            f"to {len(indices) - 1} and one of {', '.join((_LOST, *actions))}"
        )
