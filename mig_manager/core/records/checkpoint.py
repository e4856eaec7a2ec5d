"""Read and write the checkpoints of mig-parted: one line of JSON.

    {"Version":"v1","MigState":{"Devices":[{"UUID":"GPU-...","MigMode":1,"GpuInstances":[
      {"ProfileID":9,"Placement":{"Start":4,"Size":4},
       "ComputeInstances":[{"ProfileID":2,"EngProfileID":0}]}]}]}}

Profiles are those of ``NVML_GPU_INSTANCE_PROFILE_*`` and ``NVML_COMPUTE_INSTANCE_PROFILE_*`` and
not the driver's ids; placements of compute instances and GPUs without MIG are omitted.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import model, yaml_tree

VERSION = "v1"

_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1, 8: 7}
"""``NVML_COMPUTE_INSTANCE_PROFILE_*`` (``nvml.h``) by compute slices."""
_ONE_SLICE, _ONE_SLICE_REV1 = 0, 7
_COMPUTE_PROFILES = {1: _ONE_SLICE, 2: 1, 3: 2, 4: 3, 6: 6, 7: 4, 8: 5}
_MODES = {model.MigMode.DISABLED: 0, model.MigMode.ENABLED: 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A GPU instance of a checkpoint."""

    enum_index: int
    """``NVML_GPU_INSTANCE_PROFILE_*``."""
    placement: model.Placement
    compute_slices: tuple[int, ...]
    """Of each of its compute instances."""
    location: errors.Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU of a checkpoint."""

    uuid: str
    mode: model.MigMode
    instances: tuple[Instance, ...]
    location: errors.Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What GPUs had."""

    devices: tuple[Device, ...]


def render(gpus: Sequence[model.Gpu]) -> str:
    """Write what GPUs have.

    Raises:
        LayoutError: UNKNOWN_PROFILE: the driver does not report the profile of an instance.
    """
    devices = [_device_data(gpu) for gpu in gpus if gpu.current_mode is not None]
    # An empty list is null there, as is everything that Go never appended to.
    state = {"Version": VERSION, "MigState": {"Devices": devices or None}}
    return json.dumps(state, separators=(",", ":"))


def parse(text: str, *, source: str) -> Checkpoint:
    """Parse a checkpoint of ``render`` or mig-parted, without a comparison with this node's GPUs.

    Raises:
        CheckpointError: It is something else, or of another version; says where.
    """
    try:
        return Checkpoint(devices=tuple(_devices(text, source)))
    except errors.ConfigError as error:
        raise errors.CheckpointError(error.message) from error


def _device_data(gpu: model.Gpu) -> dict[str, Any]:
    mode = gpu.current_mode or model.MigMode.DISABLED
    is_on = mode is model.MigMode.ENABLED
    found = [(_spec(gpu, gi), gi) for gi in gpu.gpu_instances] if is_on else []
    # mig-parted walks the profiles, and the instances of each.
    found.sort(key=lambda each: each[0].enum_index)
    instances = [
        {
            "ProfileID": spec.enum_index,
            "Placement": {"Start": gi.placement.start, "Size": gi.placement.size},
            "ComputeInstances": [
                {"ProfileID": _compute_enum(gpu, spec, ci), "EngProfileID": 0}
                for ci in gi.compute_instances
            ]
            or None,
        }
        for spec, gi in found
    ]
    return {"UUID": gpu.uuid, "MigMode": _MODES[mode], "GpuInstances": instances or None}


def _spec(gpu: model.Gpu, gi: model.GpuInstance) -> model.GpuInstanceProfile:
    for spec in gpu.profiles or ():
        if spec.profile_id == gi.profile_id:
            return spec
    raise errors.LayoutError(
        f"{gpu} does not list the profile of {gi.profile} at {gi.placement}",
        reason=errors.Reason.UNKNOWN_PROFILE,
    )


def _compute_enum(
    gpu: model.Gpu, spec: model.GpuInstanceProfile, ci: model.ComputeInstance
) -> int:
    """Return a compute instance's profile.

    A ``1g`` with more multiprocessors than the plain one is filled by 1_SLICE_REV1.
    """
    slices = ci.profile.compute_slices
    plain = next((each for each in gpu.profiles or () if each.enum_index == _ONE_SLICE), spec)
    is_rev1 = ci.profile.spans and slices == 1 and spec.multiprocessors > plain.multiprocessors
    enum_index = _ONE_SLICE_REV1 if is_rev1 else _COMPUTE_PROFILES.get(slices)
    if enum_index is None:
        raise errors.LayoutError(
            f"a checkpoint cannot record {ci.profile} on {gpu}",
            reason=errors.Reason.UNKNOWN_PROFILE,
        )
    return enum_index


def _devices(text: str, source: str) -> Iterator[Device]:
    root = yaml_tree.parse(text, source=source)
    if root is None:
        start = errors.Location(source=source, line=1, column=1)
        raise errors.ConfigError("there is nothing in it", location=start)
    top = _mapping(root, ("Version", "MigState"))
    version = _member(top, "Version")
    if not (isinstance(version, yaml_tree.Scalar) and version.value == VERSION):
        yaml_tree.fail(
            version, f"Version must be the text {VERSION}, not {yaml_tree.shown(version)}"
        )
    seen: dict[str, errors.Location] = {}
    for item in _list(_member(_mapping(_member(top, "MigState"), ("Devices",)), "Devices")):
        device = _device(item)
        if device.uuid in seen:
            yaml_tree.fail(item, f"GPU {device.uuid} is there twice; first at {seen[device.uuid]}")
        seen[device.uuid] = device.location
        yield device


def _device(node: yaml_tree.Node) -> Device:
    data = _mapping(node, ("UUID", "MigMode", "GpuInstances"))
    uuid = _member(data, "UUID")
    if not (isinstance(uuid, yaml_tree.Scalar) and isinstance(uuid.value, str) and uuid.value):
        yaml_tree.fail(uuid, f"UUID must be a text, not {yaml_tree.shown(uuid)}")
    mode_node = _member(data, "MigMode")
    mode = {number: mode for mode, number in _MODES.items()}.get(
        yaml_tree.natural(mode_node, "MigMode")
    )
    if mode is None:
        yaml_tree.fail(mode_node, f"MigMode must be 0 or 1, not {yaml_tree.shown(mode_node)}")
    instances_node = _member(data, "GpuInstances")
    instances = tuple(_instance(item) for item in _list(instances_node))
    if instances and mode is model.MigMode.DISABLED:
        yaml_tree.fail(instances_node, "there are instances where MIG is off")
    return Device(uuid=uuid.value, mode=mode, instances=instances, location=uuid.location)


def _instance(node: yaml_tree.Node) -> Instance:
    data = _mapping(node, ("ProfileID", "Placement", "ComputeInstances"))
    place = _mapping(_member(data, "Placement"), ("Start", "Size"))
    size_node = _member(place, "Size")
    size = yaml_tree.natural(size_node, "Size")
    if size == 0:
        yaml_tree.fail(size_node, "Size must be 1 or more")
    return Instance(
        enum_index=yaml_tree.natural(_member(data, "ProfileID"), "ProfileID"),
        placement=model.Placement(yaml_tree.natural(_member(place, "Start"), "Start"), size),
        compute_slices=tuple(
            _compute_slices(item) for item in _list(_member(data, "ComputeInstances"))
        ),
        location=node.location,
    )


def _compute_slices(node: yaml_tree.Node) -> int:
    data = _mapping(node, ("ProfileID", "EngProfileID"))
    profile = _member(data, "ProfileID")
    slices = _SLICES.get(yaml_tree.natural(profile, "ProfileID"))
    if slices is None:
        yaml_tree.fail(profile, f"there is no compute-instance profile {yaml_tree.shown(profile)}")
    engine = _member(data, "EngProfileID")
    if yaml_tree.natural(engine, "EngProfileID"):
        yaml_tree.fail(engine, f"there is no engine profile {yaml_tree.shown(engine)}, only 0")
    return slices


def _mapping(node: yaml_tree.Node, known: Sequence[str]) -> yaml_tree.Mapping:
    if not isinstance(node, yaml_tree.Mapping):
        yaml_tree.fail(
            node, f"expected a mapping with {', '.join(known)}, not {yaml_tree.shown(node)}"
        )
    yaml_tree.check_keys(node, known)
    return node


def _member(node: yaml_tree.Mapping, key: str) -> yaml_tree.Node:
    value = node.get(key)
    if value is None:
        yaml_tree.fail(node, f"'{key}' is missing")
    return value


def _list(node: yaml_tree.Node) -> tuple[yaml_tree.Node, ...]:
    if yaml_tree.is_null(node):
        return ()
    if not isinstance(node, yaml_tree.Sequence):
        yaml_tree.fail(node, f"expected a list, not {yaml_tree.shown(node)}")
    return node.items
