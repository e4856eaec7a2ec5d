"""The simulated node as JSON and back."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.sandbox.driver import states


def encode(value: Any) -> Any:
    """Return frozen values as what ``json.dumps`` takes."""
    if isinstance(value, model.Placement):
        return [value.start, value.size]
    if dataclasses.is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def decode(raw: Mapping[str, Any]) -> states.NodeState:
    """Return the node that ``encode`` wrote."""
    return states.NodeState(
        **{
            **raw,
            "options": _options(raw["options"]),
            "gpus": tuple(_gpu(each) for each in raw["gpus"]),
            "clients": tuple(_client(each) for each in raw["clients"]),
            "faults": tuple(_armed(each) for each in raw["faults"]),
        }
    )


def _options(raw: Mapping[str, Any]) -> states.Options:
    return states.Options(
        **{
            **raw,
            "latency": states.Latency(**raw["latency"]),
            "swapped_gpus": tuple(raw["swapped_gpus"]),
            "linked_gpus": tuple(tuple(each) for each in raw.get("linked_gpus", ())),
            "virtualization": states.Virtualization(raw["virtualization"]),
            # A file from before events were simulated has no such knob.
            "mig_events": states.MigEvents(raw.get("mig_events", states.MigEvents.ALWAYS)),
            "absent_functions": tuple(raw["absent_functions"]),
            "faults": tuple(states.Fault(**each) for each in raw["faults"]),
        }
    )


def _gpu(raw: Mapping[str, Any]) -> states.GpuState:
    instances = tuple(_gpu_instance(each) for each in raw["instances"])
    return states.GpuState(**{**raw, "instances": instances})


def _gpu_instance(raw: Mapping[str, Any]) -> states.GpuInstance:
    computes = tuple(_compute_instance(each) for each in raw["compute_instances"])
    placement = model.Placement(*raw["placement"])
    return states.GpuInstance(**{**raw, "placement": placement, "compute_instances": computes})


def _compute_instance(raw: Mapping[str, Any]) -> states.ComputeInstance:
    return states.ComputeInstance(**{**raw, "placement": model.Placement(*raw["placement"])})


def _client(raw: Mapping[str, Any]) -> states.Client:
    return states.Client(**{**raw, "kind": states.ClientKind(raw["kind"])})


def _armed(raw: Mapping[str, Any]) -> states.ArmedFault:
    return states.ArmedFault(**{**raw, "fault": states.Fault(**raw["fault"])})
