"""The reconfigurations that speed is measured on: 8-GPU nodes, from one layout to another."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from mig_manager.adapters import host
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.core import model, profile_name
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults

Devices = Mapping[str, int] | None
"""How many of each profile a GPU has; None: its MIG is off."""

GPUS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One reconfiguration of a node."""

    product: str
    before: tuple[Devices, ...]
    """By GPU."""
    after: tuple[Devices, ...]

    @property
    def name(self) -> str:
        """For people."""
        changed = sum(a != b for a, b in zip(self.before, self.after, strict=True))
        pairs = zip(self.before, self.after, strict=True)
        first = next((a, b) for a, b in pairs if a != b)
        where = "every GPU" if changed == len(self.after) else f"{changed} of {len(self.after)}"
        return f"{_described(first[0])} -> {_described(first[1])}, {where}"

    @property
    def spec(self) -> str:
        """The node, as the simulation names it."""
        return f"{len(self.before)}x{self.product}"

    def wanted(self, gpus: Sequence[model.Gpu]) -> dict[str, model.DesiredGpu]:
        """Return the requested state of the GPUs, by UUID."""
        return _wanted(gpus, self.after)


def prepare(transition: Transition, path: pathlib.Path) -> states.MachineState:
    """Simulate the node in the layout before the transition; return its state."""
    simulated.create(transition.spec, path)
    nvml_faults.install(path)
    try:
        gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock())
        seen = gpus.observe()
        gpus.execute(planner.plan(seen, _wanted(seen, transition.before)), seen)
    finally:
        simulated.load(None)
    return nvml_faults.SharedState(path).read()


def _wanted(gpus: Sequence[model.Gpu], layout: Sequence[Devices]) -> dict[str, model.DesiredGpu]:
    return {
        gpu.uuid: model.DesiredGpu.of(
            model.MigMode.DISABLED if devices is None else model.MigMode.ENABLED,
            {profile_name.parse(name): count for name, count in (devices or {}).items()},
        )
        for gpu, devices in zip(gpus, layout, strict=True)
    }


def _described(devices: Devices) -> str:
    if devices is None:
        return "MIG off"
    return " + ".join(f"{count}x {name}" for name, count in devices.items()) or "empty"


def _every(product: str, before: Devices, after: Devices) -> Transition:
    return Transition(product=product, before=(before,) * GPUS, after=(after,) * GPUS)


def _some(product: str, before: Devices, after: Devices, *, count: int) -> Transition:
    """Change some GPUs, and leave the others, which have the same layout before."""
    whole = (before,) * GPUS
    return Transition(product=product, before=whole, after=(after,) * count + whole[count:])


A100, H100, A30 = "A100-SXM4-40GB", "H100-SXM5-80GB", "A30"
_A = {"balanced": {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}}
_H = {"balanced": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}}

TRANSITIONS = (
    _every(A100, None, {"1g.5gb": 7}),
    _every(A100, None, {"7g.40gb": 1}),
    _every(A100, None, _A["balanced"]),
    _some(A100, None, {"3g.20gb": 2}, count=1),
    _every(A100, {"1g.5gb": 7}, None),
    _some(A100, {"3g.20gb": 2}, None, count=4),
    _every(A100, {"1g.5gb": 7}, {"2g.10gb": 3}),
    _every(A100, {"1g.5gb": 7}, {"3g.20gb": 2}),
    _every(A100, {"1g.5gb": 7}, {"7g.40gb": 1}),
    _every(A100, {"1g.5gb": 7}, _A["balanced"]),
    _every(A100, {"7g.40gb": 1}, {"1g.5gb": 7}),
    _every(A100, {"3g.20gb": 2}, {"1g.5gb": 7}),
    _every(A100, _A["balanced"], {"1g.5gb": 7}),
    _every(A100, {"3g.20gb": 2}, _A["balanced"]),
    _every(A100, {"3g.20gb": 2}, {"4g.20gb": 1, "3g.20gb": 1}),
    _every(A100, {"3g.20gb": 2}, {"3g.20gb": 1, "1c.3g.20gb": 3}),
    _some(A100, {"3g.20gb": 2}, {"3g.20gb": 1, "2g.10gb": 2}, count=1),
    _some(A100, {"1g.5gb": 7}, {"1g.5gb": 6}, count=1),
    _some(A100, {"1g.5gb": 6}, {"1g.5gb": 7}, count=1),
    _some(A100, {"1g.5gb": 7}, {"1g.5gb": 5, "2g.10gb": 1}, count=1),
    _every(H100, None, {"1g.10gb": 7}),
    _every(H100, None, _H["balanced"]),
    _every(H100, {"1g.10gb": 7}, None),
    _every(H100, {"1g.10gb": 7}, {"1g.20gb": 4}),
    _every(H100, {"3g.40gb": 2}, {"7g.80gb": 1}),
    _every(H100, {"7g.80gb": 1}, _H["balanced"]),
    _some(H100, {"3g.40gb": 2}, {"1g.10gb": 7}, count=2),
    _some(H100, _H["balanced"], {"1g.10gb": 4, "3g.40gb": 1}, count=1),
    _every(A30, None, {"1g.6gb": 4}),
    _every(A30, {"1g.6gb": 4}, {"2g.12gb": 2}),
    _every(A30, {"2g.12gb": 2}, {"4g.24gb": 1}),
)
"""On the first GPUs where not on every one."""
