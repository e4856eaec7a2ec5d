"""Show the progress of a change on a terminal."""

from mig_manager.adapters.host import line_writer
from mig_manager.core import messages, ports, steps


class Progress(ports.Telemetry):
    """Shows the finished steps in one line, which the next remark replaces.

    ``columns`` is the terminal's width; 0 shows nothing.
    """

    def __init__(self, remarks: line_writer.LineWriter, columns: int) -> None:
        self._remarks = remarks
        self._columns = columns
        self._done: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def steps_began(self, plan: steps.Plan) -> None:
        """Show that no step has finished."""
        self._total = {gpu.gpu_index: len(gpu.steps) for gpu in plan.gpus if gpu.steps}
        self._done = dict.fromkeys(self._total, 0)
        self._show(self.line)

    def step_ended(self, gpu_index: int) -> None:
        """Count it."""
        self._done[gpu_index] += 1
        self._show(self.line)

    def gpu_operation_ended(self, name: str, seconds: float, *, is_good: bool) -> None:
        """Remove the line."""
        del name, seconds, is_good
        self._show("")

    @property
    def line(self) -> str:
        """All steps, then as many unfinished GPUs as fit."""
        head = f"{sum(self._done.values())} of {sum(self._total.values())} steps"
        unfinished = [
            f"GPU {index} {self._done[index]}/{total}"
            for index, total in self._total.items()
            if self._done[index] < total
        ]
        for shown in range(len(unfinished), 0, -1):
            line = f"{head}: {messages.list_names(unfinished, limit=shown)}"
            if len(line) < self._columns:
                return line
        return head[: max(0, self._columns - 1)]

    def _show(self, text: str) -> None:
        if self._columns:
            self._remarks.show(text)
