"""What ``apply`` needs beside GPUs, in memory."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.change import apply as applying
from mig_manager.change import boot, local
from mig_manager.core import model, steps
from mig_manager.core.layout import config, plans
from tests import fakes, gpu_values, scenes

LAYOUTS = config.parse(
    """
version: v1
mig-configs:
  before:
  - {devices: all, mig-enabled: true, mig-devices: {2g.10gb: 1, 3g.20gb: 1}}
  wanted:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  other:
  - {devices: all, mig-enabled: true, mig-devices: {7g.40gb: 1}}
  mixed:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}
  split:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  - {devices: [1], mig-enabled: true, mig-devices: {1c.3g.20gb: 2, 1g.5gb: 1}}
  one-off:
  - {devices: [0], mig-enabled: false}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}
  bare:
  - {devices: all, mig-enabled: true, mig-devices: {}}
  'off':
  - {devices: all, mig-enabled: false}
  first-only:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  too-much:
  - {devices: all, mig-enabled: true, mig-devices: {4g.20gb: 2}}
""",
    source="layouts.yaml",
)


class Gpus:
    """GPUs on which each step can fail, or be the last thing that a process did."""

    def __init__(self, product: str = "A100-SXM4-40GB", *, count: int = 2) -> None:
        board = hardware.find(product)
        self.gpus = tuple(hardware.template(board, index) for index in range(count))
        self.is_driver_loaded = True
        self.steps = 0
        self.killed_at: int | None = None
        """Number of the step, from 1, before which the process is killed."""
        self.is_stale = False
        """Whether what the next plan creates exists already."""
        self.fails: Callable[[steps.Step], bool] = lambda _step: False
        self.on_step: Callable[[steps.Step], object] = lambda _step: None

    @property
    def shape(self) -> list[object]:
        """What a rollback restores."""
        return [
            (
                gpu.current_mode,
                [
                    (
                        gi.profile,
                        gi.placement,
                        [(c.profile, c.placement) for c in gi.compute_instances],
                    )
                    for gi in gpu.gpu_instances
                ],
            )
            for gpu in self.gpus
        ]

    @contextlib.contextmanager
    def killed(self, *, at: int) -> Iterator[None]:
        """Kill the process before a step, counted from 1, if it comes that far."""
        self.steps, self.killed_at = 0, at
        try:
            with contextlib.suppress(scenes.Killed):
                yield
        finally:
            self.killed_at = None

    def observe(self) -> model.ObservedGpus:
        if not self.is_driver_loaded:
            raise errors.HardwareError(
                "no driver", reason=errors.Reason.DRIVER_NOT_LOADED, operation="nvmlInit"
            )
        return model.ObservedGpus(self.gpus)

    def reboot(self) -> None:
        """Lose all instances, and MIG mode where that needs no reset."""
        self.gpus = tuple(
            dataclasses.replace(
                gpu,
                gpu_instances=(),
                current_mode=gpu.current_mode
                if gpu.mode_change_needs_reset or gpu.current_mode is None
                else model.MigMode.DISABLED,
            )
            for gpu in self.gpus
        )

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        if plan.requires_idle and self.is_stale:
            self.is_stale = False
            raise errors.StalePlanError("GPU 0 has 1g.5gb at 2:1 already")
        for step in plan.steps:
            self.steps += 1
            if self.steps == self.killed_at:
                raise scenes.Killed
            self.on_step(step)
            if self.fails(step):
                raise errors.HardwareError("in use", reason=errors.Reason.IN_USE)
            self.gpus = tuple(
                gpu_values.apply_step(gpu, step) if gpu.uuid == step.gpu_uuid else gpu
                for gpu in self.gpus
            )
        return gpu_values.of_plan(self.gpus, plan)


class FakeExclusion:
    """A lock that others hold for as many tries as they like."""

    def __init__(self, *, refusals: int = 0) -> None:
        self.refusals = refusals
        self.is_locked = False
        self.descriptions: list[str] = []

    @contextlib.contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        if self.refusals:
            self.refusals -= 1
            raise errors.LockedError("another manager is at work: agent")
        self.descriptions.append(doing)
        self.is_locked = True
        try:
            yield
        finally:
            self.is_locked = False


class FakeJournal:
    """A journal, or the layout kept for the next boot, in memory; each act can be refused."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.aside: str | None = None
        self.refused: set[str] = set()

    def _act(self, name: str) -> None:
        if name in self.refused:
            raise errors.ConfigError(f"cannot {name} the journal")

    def read(self) -> str | None:
        self._act("read")
        return self.text

    def write(self, text: str) -> None:
        self._act("write")
        self.text = text

    save = write

    def clear(self) -> None:
        self._act("clear")
        self.text = None

    def set_aside(self) -> str:
        self._act("set_aside")
        self.aside, self.text = self.text, None
        self.refused.discard("read")
        return "journal.unreadable"


class Node:
    """A node whose process can be killed at any step, with its lock, journal and messages."""

    def __init__(
        self, start: str = "before", gpus: Gpus | None = None, layouts: config.Document = LAYOUTS
    ) -> None:
        self.gpus = gpus or Gpus()
        self.layouts = layouts
        self.clock = fakes.FakeClock()
        self.exclusion = FakeExclusion()
        self.journal = FakeJournal()
        self.boot_layout = FakeJournal()
        self.boot_id = "boot-1"
        self.owner = fakes.NodeRig(gpus=())
        """Has the hooks and the device files."""
        self.guard: local.Uninterrupted = lambda: contextlib.nullcontext(tuple)
        self.notes: list[str] = []
        if start != "off":
            self.set_up(start)
            self.gpus.steps = 0

    @property
    def shape(self) -> list[object]:
        return self.gpus.shape

    def apply(
        self,
        layout: config.Layout | errors.MigManagerError,
        *,
        scope: plans.Scope = plans.Scope.ALL,
        may_reset: bool = True,
    ) -> plans.Applied:
        """Apply a layout; an error is raised when the layout is resolved."""

        def resolve() -> config.Layout:
            if isinstance(layout, errors.MigManagerError):
                raise layout
            return layout

        deps = dataclasses.replace(self._dependencies(), may_reset=may_reset)
        return applying.apply(deps, resolve, scope=scope)

    def change_to(self, name: str, **options: Any) -> plans.Applied:
        return self.apply(self.layouts.layout(name), **options)

    def restore(self, text: str, *, scope: plans.Scope = plans.Scope.ALL) -> plans.Applied:
        source = fakes.FakeConfig(text, name="c.json")
        return applying.restore(self._dependencies(), source, scope=scope)

    def boot(self, fallback: str = "", *, driver_timeout_s: float = 120.0) -> boot.Restored:
        """Restore the verified layout, or apply a fallback."""
        return boot.boot(
            self._dependencies(),
            (lambda: self.layouts.layout(fallback)) if fallback else None,
            driver_timeout_s=driver_timeout_s,
        )

    def has(self, name: str) -> bool:
        return plans.plan(self.gpus.observe(), self.layouts.layout(name)).is_applied

    def cut_off(self, name: str, *, at: int) -> bool:
        """Apply a layout and be killed at a step; return whether there was such a step."""
        with self.gpus.killed(at=at):
            self.change_to(name)
            return False
        return True

    def set_up(self, name: str) -> None:
        """Apply a layout as another program does, beside the journal."""
        apply(self.gpus, self.layouts.layout(name))

    def _dependencies(self) -> local.Dependencies:
        return local.Dependencies(
            gpus=self.gpus,
            lock=self.exclusion,
            journal=self.journal,
            boot_layout=self.boot_layout,
            clock=self.clock,
            boot_id=self.boot_id,
            lock_timeout_s=30.0,
            notify=self.notes.append,
            uninterrupted=self.guard,
            hooks=self.owner.programs if self.owner.hooks else None,
            refresh_files=self.owner.host.refresh,
            reset=self.owner.host,
        )


def apply(
    gpus: Gpus, layout: config.Layout, *, scope: plans.Scope = plans.Scope.ALL
) -> plans.Applied:
    """Apply a layout on a node with a free lock and no journal."""
    return Node("off", gpus).apply(layout, scope=scope)


def is_creation(step: steps.Step) -> bool:
    return isinstance(step, steps.CreateGpuInstance)
