"""``restore`` at a shell: GPUs return to a checkpoint, as with ``apply`` or not at all."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence

from mig_manager.change import applying, commands, standalone
from mig_manager.core import model
from mig_manager.core.planner import recall
from mig_manager.core.records import checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWish:
    """Implements ``applying.Wish`` for a checkpoint."""

    name: str
    content_hash: str
    content: checkpoint.Checkpoint

    @staticmethod
    def of(text: str, *, source: str) -> "CheckpointWish":
        """Read a checkpoint.

        Args:
            text: Of the file.
            source: Name of the file.

        Raises:
            CheckpointError: It is none.
        """
        return CheckpointWish(
            name=f"checkpoint {source}",
            content_hash=hashlib.sha256(text.encode(errors="replace")).hexdigest(),
            content=checkpoint.parse(text, source=source),
        )

    def covered(self, observed: model.ObservedGpus) -> Collection[str]:
        """Return the UUIDs of the GPUs that it tells of.

        Raises:
            CheckpointError: They cannot have what they had.
        """
        return recall.plan(self.content, observed).covered

    def due_elsewhere(
        self, observed: model.ObservedGpus, due: Sequence[model.GpuSnapshot]
    ) -> tuple[model.GpuSnapshot, ...]:
        """Return what stays due on unreachable GPUs: it cannot tell of any of them."""
        return observed.missing(due)

    def planned(self, observed: model.ObservedGpus, *, scope: commands.Scope) -> commands.Planned:
        """Return what the way back to it would change.

        Raises:
            CheckpointError: The GPUs cannot have what they had.
            LayoutError: NOT_SUPPORTED: a GPU is a vGPU.
        """
        due = recall.plan(
            self.content, observed, is_mode_only=scope is commands.Scope.MODE_ONLY
        ).plan
        return commands.Planned(layout=self.name, gpus=observed, wanted={}, plan=due, holders={})


def restore(
    world: standalone.World,
    read: Callable[[], CheckpointWish],
    *,
    scope: commands.Scope = commands.Scope.ALL,
) -> commands.Applied:
    """Return GPUs to what a checkpoint tells of them, and prove that they have it.

    What is right already stays. GPUs that the checkpoint does not tell of are not touched.

    Args:
        world: What to work with.
        read: Returns the checkpoint.
        scope: How much of it counts.

    Raises:
        CheckpointError: It is no checkpoint, or none of these GPUs; nothing was changed.
        MigManagerError: As ``applying.apply``.
    """
    return applying.bring(world, read, scope=scope, doing="restore")
