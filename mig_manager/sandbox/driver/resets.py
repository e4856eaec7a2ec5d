"""Reset simulated GPUs, as ``nvidia-smi --gpu-reset`` resets real ones."""

import threading
from collections.abc import Sequence

from mig_manager import errors, reasons
from mig_manager.adapters.host import device_users
from mig_manager.core import messages, model, ports
from mig_manager.sandbox.driver import state_file, states

_REASONS = {
    states.Code.IN_USE: reasons.Reason.IN_USE,
    states.Code.NO_PERMISSION: reasons.Reason.NO_PERMISSION,
    states.Code.NOT_SUPPORTED: reasons.Reason.REBOOT_REQUIRED,
}


class SimulatedReset:
    """Implements ``ports.GpuReset`` for the GPUs in a state file."""

    def __init__(self, state: state_file.SharedState) -> None:
        self._state = state

    def restore_persistence(self, _gpus: Sequence[model.Gpu]) -> bool:
        """Return True: this reset leaves persistence mode on."""
        return True

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        _record_persistence: ports.RecordPersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        """Reset GPUs in one command; see ``ports.GpuReset``."""
        from mig_manager.adapters.host import gpu_reset  # noqa: PLC0415 - reads XML

        for gpu in gpus:
            gpu_reset.require_resettable(gpu, is_repair=is_repair)
        uuids = {gpu.uuid for gpu in gpus}
        indices = [board.index for board in self._state.boards if board.uuid in uuids]
        node = self._state.read()
        threading.Event().wait(node.options.latency.mode_with_reset_s)
        code = self._state.reset_gpus(indices).code
        if code is states.Code.SUCCESS:
            return
        why = f"the simulated driver answers {code.name}"
        users = [
            f"{each.name} (pid {each.pid})" for each in node.clients if each.gpu_uuid in uuids
        ]
        if code is states.Code.IN_USE and users:
            why = f"in use by {device_users.name_users(users)}"
        raise errors.HostError(
            f"no reset of {messages.list_names([*map(str, gpus)])}: {why}",
            reason=_REASONS.get(code, reasons.Reason.RESET_REQUIRED),
        )
