"""The simulated node as JSON and back."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.sandbox import nvml_model


def encode(value: Any) -> Any:
    """Return frozen values as what ``json.dumps`` takes."""
    if isinstance(value, model.Placement):
        return [value.start, value.size]
    if dataclasses.is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def decode(raw: Mapping[str, Any]) -> nvml_model.NodeState:
    """Return the node that ``encode`` wrote."""
    return nvml_model.NodeState(
        **{
            **raw,
            "options": _options(raw["options"]),
            "gpus": tuple(_gpu(each) for each in raw["gpus"]),
            "clients": tuple(_client(each) for each in raw["clients"]),
            "faults": tuple(_armed(each) for each in raw["faults"]),
        }
    )


def _options(raw: Mapping[str, Any]) -> nvml_model.Options:
    return nvml_model.Options(
        **{
            **raw,
            "latency": nvml_model.Latency(**raw["latency"]),
            "swapped_gpus": tuple(raw["swapped_gpus"]),
            "virtualization": nvml_model.Virtualization(raw["virtualization"]),
            "absent_functions": tuple(raw["absent_functions"]),
            "faults": tuple(nvml_model.Fault(**each) for each in raw["faults"]),
        }
    )


def _gpu(raw: Mapping[str, Any]) -> nvml_model.GpuState:
    instances = tuple(_gpu_instance(each) for each in raw["instances"])
    return nvml_model.GpuState(**{**raw, "instances": instances})


def _gpu_instance(raw: Mapping[str, Any]) -> nvml_model.GpuInstance:
    computes = tuple(_compute_instance(each) for each in raw["compute_instances"])
    placement = model.Placement(*raw["placement"])
    return nvml_model.GpuInstance(**{**raw, "placement": placement, "compute_instances": computes})


def _compute_instance(raw: Mapping[str, Any]) -> nvml_model.ComputeInstance:
    return nvml_model.ComputeInstance(**{**raw, "placement": model.Placement(*raw["placement"])})


def _client(raw: Mapping[str, Any]) -> nvml_model.Client:
    return nvml_model.Client(**{**raw, "kind": nvml_model.ClientKind(raw["kind"])})


def _armed(raw: Mapping[str, Any]) -> nvml_model.ArmedFault:
    return nvml_model.ArmedFault(**{**raw, "fault": nvml_model.Fault(**raw["fault"])})
