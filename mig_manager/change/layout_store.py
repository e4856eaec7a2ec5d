"""The layout that was verified last, saved on the host for the next boot.

No MIG instance survives a reboot.
"""

import dataclasses
from collections.abc import Collection

from mig_manager import errors
from mig_manager.core import model, ports
from mig_manager.core.planner import planner
from mig_manager.core.records import verified_layouts


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedLayoutStore:
    """The saved layout; only the process that has the node's lock writes it."""

    file: ports.SavedText
    boot_id: str

    def parse(self) -> verified_layouts.VerifiedLayout | None:
        """Return the layout, None if there is none; ConfigError if unreadable or invalid."""
        text = self.file.read()
        try:
            return None if text is None else verified_layouts.VerifiedLayout.from_json(text)
        except ValueError as error:
            raise errors.ConfigError(str(error)) from error

    def read(self) -> verified_layouts.VerifiedLayout | None:
        """Return the layout; None if there is no valid one."""
        try:
            return self.parse()
        except errors.ConfigError:
            return None

    def without_verified_since(
        self, before: model.Snapshots, gpus: model.ObservedGpus
    ) -> tuple[model.Snapshots, str]:
        """Return the snapshots of an interrupted change that a rollback may still restore.

        An interrupted change leaves no verified layout: where there is one, another manager has
        applied it since, and its instances stay. The second value names it, or is empty.
        """
        saved = self.read()
        if saved is None or saved.boot_id != self.boot_id:
            return before, ""
        states = {gpu.uuid: gpu for gpu in saved.snapshots if gpu.uuid in saved.covered}
        verified = [
            gpu for gpu in before if gpu.uuid in states and _is_active(states[gpu.uuid], gpus)
        ]
        if all(_is_active(gpu, gpus) for gpu in verified):
            return before, ""
        return tuple(gpu for gpu in before if gpu not in verified), saved.layout

    def save(
        self,
        gpus: model.ObservedGpus,
        *,
        layout: str,
        content_hash: str,
        covered: Collection[str],
    ) -> None:
        """Save a verified layout, and keep the saved state of unreachable GPUs.

        ``covered`` has the UUIDs of the GPUs that it selects.

        A GPU whose MIG mode is pending is not saved: a boot would undo the new mode.

        Raises:
            ConfigError: It cannot be written.
        """
        snapshots = tuple(gpu.snapshot for gpu in gpus if not gpu.has_pending_mode)
        inventory = tuple(gpus)
        earlier = {}
        # An invalid saved layout is replaced.
        if gpus.unreachable and (saved := self.read()):
            missing = gpus.unreachable_snapshots(saved.snapshots)
            snapshots += missing
            if (saved.layout, saved.content_hash) != (layout, content_hash):
                earlier = {gpu.uuid: saved.layout for gpu in missing}
            earlier |= {
                gpu.uuid: saved.earlier[gpu.uuid] for gpu in missing if gpu.uuid in saved.earlier
            }
            if saved.boot_id == self.boot_id:
                lost = {gpu.uuid for gpu in missing}
                inventory += tuple(gpu for gpu in saved.gpus if gpu.uuid in lost)
        self._write(
            verified_layouts.VerifiedLayout(
                layout=layout,
                content_hash=content_hash,
                boot_id=self.boot_id,
                snapshots=snapshots,
                gpus=inventory,
                earlier=earlier,
                covered=tuple(sorted(covered)),
            )
        )

    def drop_pending(self, gpus: model.ObservedGpus) -> None:
        """Drop the GPUs whose MIG mode is pending: a boot would undo the new mode.

        Raises:
            ConfigError: The layout without them cannot be written.
        """
        saved = self.read()
        if saved is None:
            return
        uuids = {gpu.uuid for gpu in gpus if gpu.has_pending_mode}
        kept = tuple(gpu for gpu in saved.snapshots if gpu.uuid not in uuids)
        self._write(dataclasses.replace(saved, snapshots=kept))

    def _write(self, layout: verified_layouts.VerifiedLayout) -> None:
        self.file.save(layout.to_json())


def _is_active(snapshot: model.GpuSnapshot, gpus: model.ObservedGpus) -> bool:
    """Return whether a GPU has exactly the instances of a snapshot."""
    try:
        return planner.are_restored(gpus, [snapshot])
    except errors.LayoutError:
        return False
