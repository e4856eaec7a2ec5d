"""The target of a run: the requested layout, or GPUs to repair."""

import collections
import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog

from mig_manager.core import model, steps
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import layouts, selection
from mig_manager.core.planner import planner

_log = structlog.get_logger()


class Target(Protocol):
    """The desired state of GPUs, which a run plans and verifies."""

    @property
    def observed(self) -> model.ObservedGpus | None:
        """The GPUs, if they were observed for the target just now."""

    def select(self, gpus: Sequence[model.Gpu]) -> Mapping[str, model.DesiredGpu]:
        """Return the desired state of its GPUs by UUID.

        Raises:
            LayoutError: The target is for other GPUs.
        """

    def plan(
        self,
        gpus: model.ObservedGpus,
        *,
        use: Mapping[str, int] = types.MappingProxyType({}),
    ) -> steps.Plan:
        """Plan what remains; ``use`` of devices as for ``planner.plan``.

        Raises:
            LayoutError: The target is impossible on these GPUs.
        """

    def unrestored_snapshots(
        self, gpus: model.ObservedGpus, before: model.Snapshots
    ) -> model.Snapshots:
        """Return the unreachable GPUs to restore later."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTarget:
    """Implements ``Target`` for the requested layout; an error has the location in the file."""

    layout: layouts.Layout
    warnings: tuple[yaml_diagnostics.Diagnostic, ...] = ()  # problems that lenient parsing accepts
    is_from_owner: bool = False  # whether the owner wrote it
    observed: model.ObservedGpus | None = None
    """The GPUs, if the layout was generated from them just now."""

    def select(self, gpus: Sequence[model.Gpu]) -> Mapping[str, model.DesiredGpu]:
        """Return the layout of its GPUs, and log what lenient parsing accepts."""
        with selection.located(self.layout, gpus):
            desired = selection.select(self.layout, gpus)
        for remark in (*self.warnings, *selection.lenient_warnings(self.layout, gpus)):
            _log.warning("config_overlooked", place=str(remark.location), problem=remark.message)
        return desired

    def plan(
        self,
        gpus: model.ObservedGpus,
        *,
        use: Mapping[str, int] = types.MappingProxyType({}),
    ) -> steps.Plan:
        """Plan the layout."""
        with selection.located(self.layout, gpus):
            return planner.plan(gpus, selection.select(self.layout, gpus), use=use)

    def unrestored_snapshots(
        self, gpus: model.ObservedGpus, before: model.Snapshots
    ) -> model.Snapshots:
        """Return the unreachable GPUs outside the layout."""
        return selection.unrestored_elsewhere(self.layout, gpus, before)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepairTarget:
    """Implements ``Target`` for GPUs to reset, whose instances then return to their placements."""

    before: model.Snapshots  # the GPUs as they were, also before an interrupted attempt
    observed: model.ObservedGpus

    def select(self, _gpus: Sequence[model.Gpu]) -> Mapping[str, model.DesiredGpu]:
        """Return the instances of its GPUs."""
        return {
            gpu.uuid: model.DesiredGpu.of(
                gpu.current_mode or model.MigMode.DISABLED,
                collections.Counter(
                    ci.profile for gi in gpu.gpu_instances for ci in gi.compute_instances
                ),
            )
            for gpu in self.before
        }

    def plan(
        self,
        gpus: model.ObservedGpus,
        *,
        use: Mapping[str, int] = types.MappingProxyType({}),
    ) -> steps.Plan:
        """Plan the resets, or the instances of GPUs that were reset."""
        return planner.repair(gpus, self.before)

    def unrestored_snapshots(
        self, gpus: model.ObservedGpus, before: model.Snapshots
    ) -> model.Snapshots:
        """Return the unreachable GPUs."""
        return gpus.unreachable_snapshots(before)
