"""Small tables of products, and GPUs in a notation that a test can read.

``3g.20gb@4`` is a GPU instance at memory slice 4 with one compute instance that spans it,
``3g.20gb@4[]`` one without any, ``3g.20gb@4[2c@0 1c@2]`` one with these, ``3g.20gb@4[1c 1c]``
one whose driver does not report spans.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model, steps
from mig_manager.core.objects import node_object, pod_object
from tests.rigs import layout_table
from tests.rigs.node import gpu_values

_PROFILE = re.compile(r"(?:(\d+)c\.)?(\d+)g\.(\d+)gb(?:([+-])(.+))?")
_INSTANCE = re.compile(r"(?P<profile>[^@]+)@(?P<start>\d+)(?:\[(?P<inside>[^]]*)\])?")


def profile(text: str) -> model.Profile:
    match = _PROFILE.fullmatch(text)
    assert match, text
    compute, slices, memory, sign, words = match.groups()
    attributes = tuple(sorted(words.split(","))) if words else ()
    return model.Profile(
        compute_slices=int(compute or slices),
        gpu_slices=int(slices),
        memory_gb=int(memory),
        attributes=attributes if sign == "+" else (),
        negated_attributes=attributes if sign == "-" else (),
    )


def _table(size_of_slice: int, rows: str) -> tuple[model.GpuInstanceProfile, ...]:
    """Read rows of name, enum, id, memory, multiprocessors, engines and placements."""
    specs = []
    for row in rows.strip().splitlines():
        name, enum_index, profile_id, memory, processors, engines, *spans = row.split()
        decoders, encoders, jpegs, ofas = map(int, engines.split("/"))
        starts, size = spans[0].split(":")
        placements = tuple(
            model.Placement(int(start) * size_of_slice, int(size) * size_of_slice)
            for start in starts.split(",")
        )
        specs.append(
            model.GpuInstanceProfile(
                profile=profile(name),
                enum_index=int(enum_index),
                profile_id=int(profile_id),
                memory_mib=int(memory),
                multiprocessors=int(processors),
                max_instances=1,
                engines=model.Engines(
                    decoders=decoders, encoders=encoders, jpegs=jpegs, ofas=ofas
                ),
                placements=placements,
            )
        )
    return tuple(specs)


A100 = _table(
    1,
    """
    1g.5gb     0 19  4864 14 0/0/0/0 0,1,2,3,4,5,6:1
    2g.10gb    1 14  9856 28 1/0/0/0 0,2,4:2
    3g.20gb    2  9 19968 42 2/0/0/0 0,4:4
    4g.20gb    3  5 19968 56 2/0/0/0 0:4
    7g.40gb    4  0 40192 98 5/0/1/1 0:8
    1g.5gb+me  7 20  4864 14 1/0/1/1 0,1,2,3,4,5,6:1
    1g.10gb    9 15  9856 14 1/0/0/0 0,2,4,6:2
    """,
)
H100 = _table(
    1,
    """
    1g.10gb    0 19  9984  16 1/0/1/0 0,1,2,3,4,5,6:1
    2g.20gb    1 14 20096  32 2/0/2/0 0,2,4:2
    3g.40gb    2  9 40448  60 3/0/3/0 0,4:4
    4g.40gb    3  5 40448  64 4/0/4/0 0:4
    7g.80gb    4  0 81152 132 7/0/7/1 0:8
    1g.10gb+me 7 20  9984  16 1/0/1/1 0,1,2,3,4,5,6:1
    1g.20gb    9 15 20096  26 1/0/1/0 0,2,4,6:2
    """,
)
A30 = _table(
    1,
    """
    1g.6gb     0 14  5952 14 1/0/0/0 0,1,2,3:1
    2g.12gb    1  5 11968 28 2/0/0/0 0,2:2
    4g.24gb    3  0 24000 56 4/0/1/1 0:4
    1g.6gb+me  7 21  5952 14 1/0/1/1 0,1,2,3:1
    2g.12gb+me 8  6 11968 28 2/0/1/1 0,2:2
    """,
)
RTX6000 = _table(
    3,
    """
    1g.24gb         0 14 24192  46 1/1/1/0 0,1,2,3:1
    2g.48gb         1  5 48512  94 2/2/2/0 0,2:2
    4g.96gb         3  0 97408 188 4/4/4/1 0:4
    1g.24gb+me      7 21 24192  46 1/1/1/1 0,1,2,3:1
    1g.24gb+gfx    10 47 24192  46 1/1/1/0 0,1,2,3:1
    2g.48gb+gfx    11 35 48512  94 2/2/2/0 0,2:2
    4g.96gb+gfx    12 32 97408 188 4/4/4/1 0:4
    1g.24gb-me     13 67 24192  46 0/0/0/0 0,1,2,3:1
    2g.48gb-me     14 66 48512  94 0/0/0/0 0,2:2
    1g.24gb+me.all 15 65 24192  46 4/4/4/1 0,1,2,3:1
    2g.48gb+me.all 16 64 48512  94 4/4/4/1 0,2:2
    """,
)
PRODUCTS = {"A100": A100, "H100": H100, "A30": A30, "RTX6000": RTX6000}
"""One product for each way in which placements differ. A new one gets a row if a rule of the core
depends on it; the properties of every product are tested with ``gpu_values.gpus_of``."""


def gpu(
    specs: tuple[model.GpuInstanceProfile, ...] | None,
    *instances: str,
    mode: model.MigMode | None = model.MigMode.ENABLED,
    pending: model.MigMode | None = None,
    needs_reset: bool = True,
    index: int = 0,
) -> model.Gpu:
    """Build a GPU that offers these profiles and has these instances."""
    specs_by_profile = {spec.profile: spec for table in PRODUCTS.values() for spec in table}
    if specs:
        specs_by_profile.update({spec.profile: spec for spec in specs})
    return model.Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="Test GPU",
        architecture=model.Architecture.AMPERE,
        pci_address=f"00000000:{index:02x}:00.0",
        pci_device_id=0x20B010DE,
        pci_subsystem_id=0x134F10DE,
        memory_mib=40960,
        current_mode=mode,
        pending_mode=pending or mode,
        mode_change_needs_reset=needs_reset,
        profiles=specs,
        gpu_instances=tuple(
            _instance(number, text, index, specs_by_profile)
            for number, text in enumerate(instances)
        ),
    )


def _instance(
    number: int,
    text: str,
    index: int,
    specs_by_profile: dict[model.Profile, model.GpuInstanceProfile],
) -> model.GpuInstance:
    match = _INSTANCE.fullmatch(text)
    assert match, text
    spec = specs_by_profile[profile(match["profile"])]
    start = int(match["start"])
    inside = match["inside"]
    if inside is None:
        inside = f"{spec.profile.gpu_slices}c@0"
    return model.GpuInstance(
        instance_id=number,
        profile=spec.profile,
        profile_id=spec.profile_id,
        placement=next(place for place in spec.placements if place.start == start),
        compute_instances=tuple(
            _compute(nth, word, spec.profile, f"MIG-{index}-{start}")
            for nth, word in enumerate(inside.split())
        ),
    )


def _compute(nth: int, word: str, of: model.Profile, uuid_stem: str) -> model.ComputeInstance:
    size, _, start = word.partition("c@")
    slices = int(size.rstrip("c"))
    return model.ComputeInstance(
        instance_id=nth,
        profile=dataclasses.replace(of, compute_slices=slices),
        placement=model.Placement(int(start), slices) if start else None,
        uuid=f"{uuid_stem}-{start or nth}",
    )


def desired_gpu(
    devices: Mapping[str, int] | None = None, *, mode: model.MigMode = model.MigMode.ENABLED
) -> model.DesiredGpu:
    """Build a desired GPU from profile names; ``1g.5gb@4`` is pinned."""
    free: dict[model.Profile, int] = {}
    pins: dict[model.Pin, int] = {}
    for name, count in (devices or {}).items():
        profile_text, at, start = name.partition("@")
        if at:
            pins[model.Pin(profile=profile(profile_text), start=int(start))] = count
        else:
            free[profile(profile_text)] = count
    return model.DesiredGpu.of(mode, free, pins)


def devices_of(observed: model.Gpu) -> dict[model.Profile, int]:
    """Count the compute instances of a GPU by profile."""
    return dict(
        collections.Counter(
            ci.profile for gi in observed.gpu_instances for ci in gi.compute_instances
        )
    )


def node_view(**changed: Any) -> node_object.NodeView:
    """Build a node that shows nothing but these."""
    return dataclasses.replace(node_object.NodeView(name="n1", allocatable={}), **changed)


PLUGIN_LABELS = {"app": "nvidia-device-plugin-daemonset"}
OF_PLUGIN: dict[str, Any] = {"owner_kind": "DaemonSet", "mounts_plugin_sockets": True}
"""What a pod of the device plugin is beside its labels."""


def pod(name: str = "p", **changed: Any) -> pod_object.Pod:
    """Build a running pod that requests a GPU."""
    running = pod_object.Pod(
        namespace="default",
        name=name,
        uid=name,
        phase="Running",
        is_ready=True,
        gpu_resources={"nvidia.com/gpu": 1},
        container_names=("main",),
    )
    return dataclasses.replace(running, **changed)


def step_lines(plan: steps.Plan) -> list[str]:
    """Write the steps so that a test can show them."""
    lines = []
    for step in plan.steps:
        match step:
            case steps.DestroyComputeInstance():
                lines.append(
                    f"-ci {step.profile} {step.gpu_instance_id}/{step.compute_instance_id}"
                )
            case steps.DestroyGpuInstance():
                lines.append(f"-gi {step.profile} {step.placement}")
            case steps.SetMode():
                lines.append(f"mode {step.mode.value}")
            case steps.Reset():
                lines.append("reset")
            case steps.CreateGpuInstance():
                lines.append(f"+gi {step.profile} {step.placement}")
            case steps.CreateComputeInstance():
                lines.append(
                    f"+ci {step.profile} {step.placement} in {step.gpu_instance_placement}"
                )
    return lines


def balanced_gpu() -> model.ObservedGpus:
    """An A100 with 1g.5gb twice, 2g.10gb and 3g.20gb."""
    devices = layout_table.counts_of("all-balanced")
    return model.ObservedGpus(gpu_values.gpus_of("A100-SXM4-40GB", devices))
