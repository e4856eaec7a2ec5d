"""A node in memory whose GPUs the command line changes, without an agent."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.change import applying, boot, pod_use, shell
from mig_manager.core.layout import layout_documents, layout_parser, layouts, plans
from mig_manager.core.records import journals, verified_layouts
from tests.rigs import layout_table
from tests.rigs.node import (
    fake_cluster,
    fake_host,
    fakes,
    gpu_values,
    moments,
    node_rig,
    saved_file,
    strikes,
)

_DEVICES: Mapping[str, str | layout_table.Gpus] = {
    "before": "2g.10gb 3g.20gb",
    "requested": "1g.5gb 1g.5gb 3g.20gb",
    "other": "7g.40gb",
    "small": " ".join(["1g.5gb"] * 7),
    "mixed": ("1g.5gb 1g.5gb 3g.20gb", " ".join(["1g.5gb"] * 7)),
    "split": ("1g.5gb 1g.5gb 3g.20gb", "1c.3g.20gb 1c.3g.20gb 1g.5gb"),
    "one-off": ("off", "1g.5gb 1g.5gb 3g.20gb"),
    "bare": "",
    "off": "off",
    "first-only": ("7g.40gb",),
    "too-much": "4g.20gb 4g.20gb",
}
"""What each layout lists: for all GPUs, or for each of the first ones."""
LAYOUTS_TEXT = layout_table.render(
    {f"'{name}'": layout_table.rule_lines(devices) for name, devices in _DEVICES.items()}
)
LAYOUTS = layout_parser.parse(LAYOUTS_TEXT, source="layouts.yaml")


class LocalRig(node_rig.NodeRig):
    """A node whose process can be killed at any step, with its lock, journal and messages."""

    def __init__(
        self,
        start: str = "before",
        *,
        product: str = "A100-SXM4-40GB",
        count: int = 2,
        document: layout_documents.Document = LAYOUTS,
    ) -> None:
        super().__init__(gpus=gpu_values.gpus_of(f"{count}x{product}"))
        self.layouts = document
        self.lock = fakes.FakeLock()
        self.journal = saved_file.FakeSavedFile()
        self.guard: shell.SignalsDeferred = lambda: contextlib.nullcontext(tuple)
        self.notes: list[str] = []
        if start != "off":
            self.set_up(start)

    @property
    def verified_layout(self) -> verified_layouts.VerifiedLayout:
        return verified_layouts.VerifiedLayout.from_json(self.verified_layout_file.text or "")

    @property
    def local_journal(self) -> journals.Journal:
        """The open journal in the file of the command line."""
        return journals.Journal.from_json(self.journal.text or "")

    @property
    def geometry(self) -> list[object]:
        """What a rollback restores."""
        return list(gpu_values.geometry(self.gpus).values())

    @contextlib.contextmanager
    def kill_process(self, kind: moments.MomentSelector, number: int = 1) -> Iterator[None]:
        """Kill the process before a step of a kind, counted from 1, if it comes that far."""
        kill = strikes.Killed()
        with (
            contextlib.suppress(strikes.Killed),
            self.failures.adding(kind, kill, when=strikes.nth(number)),
        ):
            yield

    def apply(
        self,
        layout: layouts.Layout | errors.MigManagerError,
        *,
        is_mode_only: bool = False,
        may_reset: bool = True,
    ) -> plans.ApplyResult:
        """Apply a layout; an error is raised when the layout is resolved."""

        def resolve() -> layouts.Layout:
            if isinstance(layout, errors.MigManagerError):
                raise layout
            return layout

        deps = dataclasses.replace(self.deps, may_reset=may_reset)
        return applying.apply(deps, resolve, is_mode_only=is_mode_only)

    def change_to(self, name: str, **options: Any) -> plans.ApplyResult:
        return self.apply(self.layouts.layout(name), **options)

    def restore(self, text: str, *, is_mode_only: bool = False) -> plans.ApplyResult:
        source = fakes.FakeTextSource(text, name="c.json")
        return applying.restore(self.deps, source, is_mode_only=is_mode_only)

    def boot(
        self, fallback: str = "", *, driver_timeout_s: float = 120.0, resets_faulty: bool = False
    ) -> boot.Restored:
        """Restore the verified layout, or apply a fallback."""
        return boot.boot(
            self.deps,
            (lambda: self.layouts.layout(fallback)) if fallback else None,
            driver_timeout_s=driver_timeout_s,
            resets_faulty=resets_faulty,
        )

    def has(self, name: str) -> bool:
        """Return whether the GPUs have exactly what a layout lists; the planner is not asked."""
        devices = _DEVICES[name]
        if isinstance(devices, str):
            devices = (devices,) * len(self.gpus)
        return layout_table.have(self.gpus[: len(devices)], devices)

    def kill_apply(self, name: str, kind: moments.MomentSelector, number: int = 1) -> bool:
        """Apply a layout and be killed before a step; return whether there was such a step."""
        with self.kill_process(kind, number):
            self.change_to(name)
            return False
        return True

    def set_up(self, name: str) -> None:
        """Apply a layout as another program does, beside the journal."""
        other = LocalRig("off", document=self.layouts)
        other.gpus = self.gpus
        other.change_to(name)
        self.gpus = other.gpus

    @property
    def deps(self) -> shell.ShellDependencies:
        return shell.ShellDependencies(
            gpus=fake_host.FakeGpus(self),
            lock=self.lock,
            journal=self.journal,
            verified_layout_file=self.verified_layout_file,
            clock=self.clock,
            boot_id=self.host.boot_id,
            lock_timeout_s=30.0,
            notify=self.notes.append,
            uninterrupted=self.guard,
            hooks=fake_host.FakeHooks(self) if self.hooks.text else None,
            refresh_files=fake_host.FakeHost(self).refresh,
            reset=fake_host.FakeHost(self) if self.resets.are_available else None,
            pods=pod_use.PodUse(kubelet=lambda: fake_cluster.FakeAllocations(self)),
        )


PROFILES = {
    "A100-SXM4-40GB": ("1g.5gb", "3g.20gb"),
    "H100-SXM5-80GB": ("1g.10gb", "3g.40gb"),
}
"""Two profiles of GPUs whose MIG mode survives a reboot, and of others."""


class BootRig(LocalRig):
    """A machine with a verified layout that can be rebooted."""

    def __init__(self, product: str = "A100-SXM4-40GB") -> None:
        small, big = PROFILES[product]
        text = f"""
version: v1
mig-configs:
  mixed:
  - {{devices: [0], mig-enabled: true, mig-devices: {{{small}: 2, {big}: 1}}}}
  - {{devices: [1], mig-enabled: true, mig-devices: {{{small}: 7}}}}
  'off':
  - {{devices: all, mig-enabled: false}}
"""
        super().__init__(
            "off", product=product, document=layout_parser.parse(text, source="x.yaml")
        )
        self.change_to("mixed")
        self.driver.executed_steps.clear()
        self.before = self.geometry

    def reboot(self) -> None:
        super().reboot()
        self.driver.executed_steps.clear()
        self.notes.clear()

    def is_restored(self) -> bool:
        return self.geometry == self.before and self.journal.text is None
