"""The reconfigurations of the speed benchmarks: 8-GPU nodes, from one layout to another."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from mig_manager.adapters import host
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.core import model, profile_name
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import simulated_nvml, state_file, states
from testkit import nvml_faults

Devices = Mapping[str, int] | None  # a GPU's devices by profile; None: its MIG is off

GPUS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One reconfiguration of a node."""

    product: str
    before: tuple[Devices, ...]  # by GPU
    after: tuple[Devices, ...]

    @property
    def name(self) -> str:
        """Text for people."""
        changes = [(a, b) for a, b in zip(self.before, self.after, strict=True) if a != b]
        before, after = map(_text_of, changes[0])
        count, every = len(changes), len(self.after)
        where = "every GPU" if count == every else f"{count} of {every}"
        return f"{before} -> {after}, {where}"

    def desired_gpus(self, gpus: Sequence[model.Gpu]) -> dict[str, model.DesiredGpu]:
        """Return the desired state of the GPUs, by UUID."""
        return _desired_of(gpus, self.after)


def prepare(transition: Transition, path: pathlib.Path) -> states.MachineState:
    """Simulate the node in the layout before the transition; return its state."""
    state_file.SharedState(path).create(f"{len(transition.before)}x{transition.product}")
    nvml_faults.install(path)
    try:
        gpus = nvml_gpus.NvmlGpus(clock=host.SystemClock())
        observed = gpus.observe()
        plan = planner.plan(observed, _desired_of(observed, transition.before))
        gpus.execute(plan, observed)
    finally:
        simulated_nvml.load(None)
    return nvml_faults.SharedState(path).read()


def _desired_of(
    gpus: Sequence[model.Gpu], layout: Sequence[Devices]
) -> dict[str, model.DesiredGpu]:
    return {
        gpu.uuid: model.DesiredGpu.of(
            model.MigMode.DISABLED if devices is None else model.MigMode.ENABLED,
            {profile_name.parse(name): count for name, count in (devices or {}).items()},
        )
        for gpu, devices in zip(gpus, layout, strict=True)
    }


def _text_of(devices: Devices) -> str:
    if devices is None:
        return "MIG off"
    return " + ".join(f"{count}x {name}" for name, count in devices.items()) or "empty"


def _every(product: str, before: Devices, after: Devices) -> Transition:
    return Transition(product=product, before=(before,) * GPUS, after=(after,) * GPUS)


def _some(product: str, before: Devices, after: Devices, *, count: int) -> Transition:
    """Change the first GPUs of a node, whose GPUs have one layout before."""
    whole = (before,) * GPUS
    return Transition(product=product, before=whole, after=(after,) * count + whole[count:])


A100, H100, A30 = "A100-SXM4-40GB", "H100-SXM5-80GB", "A30"
_A100_BALANCED = {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}
_H100_BALANCED = {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}

TRANSITIONS = (
    _every(A100, None, {"1g.5gb": 7}),
    _every(A100, None, {"7g.40gb": 1}),
    _every(A100, None, _A100_BALANCED),
    _some(A100, None, {"3g.20gb": 2}, count=1),
    _every(A100, {"1g.5gb": 7}, None),
    _some(A100, {"3g.20gb": 2}, None, count=4),
    _every(A100, {"1g.5gb": 7}, {"2g.10gb": 3}),
    _every(A100, {"1g.5gb": 7}, {"3g.20gb": 2}),
    _every(A100, {"1g.5gb": 7}, {"7g.40gb": 1}),
    _every(A100, {"1g.5gb": 7}, _A100_BALANCED),
    _every(A100, {"7g.40gb": 1}, {"1g.5gb": 7}),
    _every(A100, {"3g.20gb": 2}, {"1g.5gb": 7}),
    _every(A100, _A100_BALANCED, {"1g.5gb": 7}),
    _every(A100, {"3g.20gb": 2}, _A100_BALANCED),
    _every(A100, {"3g.20gb": 2}, {"4g.20gb": 1, "3g.20gb": 1}),
    _every(A100, {"3g.20gb": 2}, {"3g.20gb": 1, "1c.3g.20gb": 3}),
    _some(A100, {"3g.20gb": 2}, {"3g.20gb": 1, "2g.10gb": 2}, count=1),
    _some(A100, {"1g.5gb": 7}, {"1g.5gb": 6}, count=1),
    _some(A100, {"1g.5gb": 6}, {"1g.5gb": 7}, count=1),
    _some(A100, {"1g.5gb": 7}, {"1g.5gb": 5, "2g.10gb": 1}, count=1),
    _every(H100, None, {"1g.10gb": 7}),
    _every(H100, None, _H100_BALANCED),
    _every(H100, {"1g.10gb": 7}, None),
    _every(H100, {"1g.10gb": 7}, {"1g.20gb": 4}),
    _every(H100, {"3g.40gb": 2}, {"7g.80gb": 1}),
    _every(H100, {"7g.80gb": 1}, _H100_BALANCED),
    _some(H100, {"3g.40gb": 2}, {"1g.10gb": 7}, count=2),
    _some(H100, _H100_BALANCED, {"1g.10gb": 4, "3g.40gb": 1}, count=1),
    _every(A30, None, {"1g.6gb": 4}),
    _every(A30, {"1g.6gb": 4}, {"2g.12gb": 2}),
    _every(A30, {"2g.12gb": 2}, {"4g.24gb": 1}),
)
