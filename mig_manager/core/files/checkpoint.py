"""Read and write the checkpoints of mig-parted: one line of JSON.

    {"Version":"v1","MigState":{"Devices":[{"UUID":"GPU-...","MigMode":1,"GpuInstances":[
      {"ProfileID":9,"Placement":{"Start":4,"Size":4},
       "ComputeInstances":[{"ProfileID":2,"EngProfileID":0}]}]}]}}

Profiles are numbers of ``NVML_GPU_INSTANCE_PROFILE_*`` and ``NVML_COMPUTE_INSTANCE_PROFILE_*``,
not the driver's ids. Placements of compute instances and GPUs without MIG are omitted.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.files import yaml_fields, yaml_text, yaml_tree

VERSION = "v1"

_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 5: 8, 6: 6, 7: 1, 8: 7}
"""Compute slices of each ``NVML_COMPUTE_INSTANCE_PROFILE_*`` (``nvml.h``)."""
_ONE_SLICE_REV1 = 7
COMPUTE_PROFILES = {slices: index for index, slices in reversed(_SLICES.items())}
"""The first profile of a number of slices."""
_MODES = {model.MigMode.DISABLED: 0, model.MigMode.ENABLED: 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A GPU instance of a checkpoint."""

    enum_index: int  # ``NVML_GPU_INSTANCE_PROFILE_*``
    placement: model.Placement
    compute_slices: tuple[int, ...]  # compute slices of each compute instance
    location: errors.Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedGpu:
    """A GPU of a checkpoint."""

    uuid: str
    mode: model.MigMode
    instances: tuple[Instance, ...]
    location: errors.Location


def render(gpus: Sequence[model.Gpu]) -> str:
    """Write the GPUs' state; LayoutError (UNKNOWN_PROFILE) if the driver lists no such profile."""
    devices = [_device_data(gpu) for gpu in gpus if gpu.current_mode is not None]
    # Go writes an empty slice as null.
    state = {"Version": VERSION, "MigState": {"Devices": devices or None}}
    return json.dumps(state, separators=(",", ":"))


def parse(text: str, *, source: str) -> tuple[SavedGpu, ...]:
    """Parse a checkpoint of ``render`` or mig-parted; CheckpointError if it is malformed."""
    try:
        return tuple(_devices(text, source))
    except errors.ConfigError as error:
        raise errors.CheckpointError(error.message) from error


def _device_data(gpu: model.Gpu) -> dict[str, Any]:
    mode = gpu.current_mode or model.MigMode.DISABLED
    is_on = mode is model.MigMode.ENABLED
    specs = {spec.profile_id: spec for spec in gpu.profiles or ()}
    plain = next((each for each in gpu.profiles or () if each.enum_index == 0), None)
    instances: list[dict[str, Any]] = []
    for gi in gpu.gpu_instances if is_on else ():
        spec = specs.get(gi.profile_id)
        if spec is None:
            raise errors.LayoutError(
                f"{gpu} does not list the profile of {gi.profile} at {gi.placement}",
                reason=reasons.Reason.UNKNOWN_PROFILE,
            )
        # 1_SLICE_REV1 spans a ``1g`` with more multiprocessors than the plain one.
        is_rev1 = plain is not None and spec.multiprocessors > plain.multiprocessors
        inside: list[dict[str, int]] = []
        for ci in gi.compute_instances:
            slices = ci.profile.compute_slices
            is_one = is_rev1 and ci.profile.spans and slices == 1
            enum_index = _ONE_SLICE_REV1 if is_one else COMPUTE_PROFILES.get(slices)
            if enum_index is None:
                raise errors.LayoutError(
                    f"a checkpoint cannot record {ci.profile} on {gpu}",
                    reason=reasons.Reason.UNKNOWN_PROFILE,
                )
            inside.append({"ProfileID": enum_index, "EngProfileID": 0})
        instances.append(
            {
                "ProfileID": spec.enum_index,
                "Placement": {"Start": gi.placement.start, "Size": gi.placement.size},
                "ComputeInstances": inside or None,
            }
        )
    # mig-parted walks the profiles, and the instances of each.
    instances.sort(key=lambda each: int(each["ProfileID"]))
    return {"UUID": gpu.uuid, "MigMode": _MODES[mode], "GpuInstances": instances or None}


def _devices(text: str, source: str) -> Iterator[SavedGpu]:
    root = yaml_text.parse(text, source=source)
    if root is None:
        start = errors.Location(source=source, line=1, column=1)
        raise errors.ConfigError("the checkpoint is empty", location=start)
    top = _mapping(root, ("Version", "MigState"))
    yaml_fields.check_version(yaml_fields.require(top, "Version"), VERSION, key="Version")
    locations: dict[str, errors.Location] = {}
    state = _mapping(yaml_fields.require(top, "MigState"), ("Devices",))
    for item in yaml_fields.items(yaml_fields.require(state, "Devices"), "Devices"):
        device = _device(item)
        if device.uuid in locations:
            first = locations[device.uuid]
            yaml_fields.fail(item, f"GPU {device.uuid} is listed twice; first at {first}")
        locations[device.uuid] = device.location
        yield device


def _device(node: yaml_tree.Node) -> SavedGpu:
    data = _mapping(node, ("UUID", "MigMode", "GpuInstances"))
    uuid = yaml_fields.require(data, "UUID")
    if not (isinstance(uuid, yaml_tree.Scalar) and isinstance(uuid.value, str) and uuid.value):
        yaml_fields.fail(uuid, f"UUID must be a text, not {yaml_fields.shown(uuid)}")
    mode_node = yaml_fields.require(data, "MigMode")
    number = yaml_fields.natural(mode_node, "MigMode")
    mode = next((each for each, code in _MODES.items() if code == number), None)
    if mode is None:
        yaml_fields.fail(mode_node, f"MigMode must be 0 or 1, not {yaml_fields.shown(mode_node)}")
    instances_node = yaml_fields.require(data, "GpuInstances")
    instances = tuple(map(_instance, yaml_fields.items(instances_node, "GpuInstances")))
    if instances and mode is model.MigMode.DISABLED:
        yaml_fields.fail(instances_node, "GpuInstances must be empty where MigMode is 0")
    return SavedGpu(uuid=uuid.value, mode=mode, instances=instances, location=uuid.location)


def _instance(node: yaml_tree.Node) -> Instance:
    data = _mapping(node, ("ProfileID", "Placement", "ComputeInstances"))
    place = _mapping(yaml_fields.require(data, "Placement"), ("Start", "Size"))
    size_node = yaml_fields.require(place, "Size")
    size = yaml_fields.natural(size_node, "Size")
    if size == 0:
        yaml_fields.fail(size_node, "Size must be 1 or more")
    inside = yaml_fields.require(data, "ComputeInstances")
    return Instance(
        enum_index=yaml_fields.natural(yaml_fields.require(data, "ProfileID"), "ProfileID"),
        placement=model.Placement(
            yaml_fields.natural(yaml_fields.require(place, "Start"), "Start"), size
        ),
        compute_slices=tuple(map(_compute_slices, yaml_fields.items(inside, "ComputeInstances"))),
        location=node.location,
    )


def _compute_slices(node: yaml_tree.Node) -> int:
    data = _mapping(node, ("ProfileID", "EngProfileID"))
    profile = yaml_fields.require(data, "ProfileID")
    slices = _SLICES.get(yaml_fields.natural(profile, "ProfileID"))
    if slices is None:
        yaml_fields.fail(profile, f"unknown compute-instance profile {yaml_fields.shown(profile)}")
    engine = yaml_fields.require(data, "EngProfileID")
    if yaml_fields.natural(engine, "EngProfileID"):
        yaml_fields.fail(
            engine, f"unknown engine profile {yaml_fields.shown(engine)}; it must be 0"
        )
    return slices


def _mapping(node: yaml_tree.Node, keys: Sequence[str]) -> yaml_tree.Mapping:
    members = yaml_fields.mapping(node, f"expected a mapping with {', '.join(keys)}")
    yaml_fields.check_keys(members, keys)
    return members
