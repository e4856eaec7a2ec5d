"""Kubelet's PodResources v1 messages, for both ends of the socket; needs protobuf, not gRPC.

Built from a table instead of generated files, which would tie us to the generator's version.
Names and numbers are those of the published service definition,
``k8s.io/kubelet/pkg/apis/podresources/v1/api.proto``. The parser skips fields that are not listed
here (CPUs, memory, NUMA topology).
"""

import dataclasses
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf import message as protobuf

SERVICE = "v1.PodResourcesLister"
LIST = f"/{SERVICE}/List"
"""``ListPodResourcesRequest`` -> ``ListPodResourcesResponse``."""
GET_ALLOCATABLE = f"/{SERVICE}/GetAllocatableResources"
"""``AllocatableResourcesRequest`` -> ``AllocatableResourcesResponse``; kubelet 1.23 and newer."""

_PACKAGE = "v1"


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    number: int
    message: str | None = None
    """None for a string."""
    is_repeated: bool = False


def _text(number: int) -> _Field:
    return _Field(number)


def _texts(number: int) -> _Field:
    return _Field(number, is_repeated=True)


def _many(message: str, number: int) -> _Field:
    return _Field(number, message=message, is_repeated=True)


_MESSAGES: dict[str, dict[str, _Field]] = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {"pod_resources": _many("PodResources", 1)},
    "AllocatableResourcesRequest": {},
    "AllocatableResourcesResponse": {"devices": _many("ContainerDevices", 1)},
    "PodResources": {
        "name": _text(1),
        "namespace": _text(2),
        "containers": _many("ContainerResources", 3),
    },
    "ContainerResources": {
        "name": _text(1),
        "devices": _many("ContainerDevices", 2),
        # 3 and 4: cpu_ids, memory.
        "dynamic_resources": _many("DynamicResource", 5),
    },
    # 3: topology.
    "ContainerDevices": {"resource_name": _text(1), "device_ids": _texts(2)},
    # 1: class_name, of Kubernetes 1.27 to 1.30 only.
    "DynamicResource": {
        "claim_name": _text(2),
        "claim_namespace": _text(3),
        "claim_resources": _many("ClaimResource", 4),
    },
    "ClaimResource": {
        "cdi_devices": _many("CDIDevice", 1),
        "driver_name": _text(2),
        "pool_name": _text(3),
        "device_name": _text(4),
    },
    "CDIDevice": {"name": _text(1)},
}


def _pool() -> descriptor_pool.DescriptorPool:
    """Build the messages in a pool of their own: another library may bring a package ``v1``."""
    file = descriptor_pb2.FileDescriptorProto(
        name="mig_manager/podresources.proto", package=_PACKAGE, syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, field in fields.items():
            message.field.add(
                name=field_name,
                number=field.number,
                label=kinds.LABEL_REPEATED if field.is_repeated else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_MESSAGE if field.message else kinds.TYPE_STRING,
                type_name=f".{_PACKAGE}.{field.message}" if field.message else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ListPodResourcesRequest = _message("ListPodResourcesRequest")
ListPodResourcesResponse = _message("ListPodResourcesResponse")
AllocatableResourcesRequest = _message("AllocatableResourcesRequest")
AllocatableResourcesResponse = _message("AllocatableResourcesResponse")
PodResources = _message("PodResources")
ContainerResources = _message("ContainerResources")
ContainerDevices = _message("ContainerDevices")
DynamicResource = _message("DynamicResource")
ClaimResource = _message("ClaimResource")
CDIDevice = _message("CDIDevice")


def parse(kind: Any, data: bytes) -> Any:
    """Parse the message of a kind.

    Raises:
        ValueError: The bytes are malformed.
    """
    try:
        return kind.FromString(data)
    except protobuf.DecodeError as err:
        raise ValueError(str(err)) from err
