"""Kubelet's PodResources v1 messages, for both ends of the socket; needs protobuf, not gRPC.

Built from a table, because generated files would tie us to the generator's version. Source:
``k8s.io/kubelet/pkg/apis/podresources/v1/api.proto``; the parser skips fields not listed here.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf import message as protobuf

SERVICE = "v1.PodResourcesLister"
DecodeError = protobuf.DecodeError

_PACKAGE = "v1"
_TEXT = "string"
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {"pod_resources": (1, "repeated PodResources")},
    "AllocatableResourcesRequest": {},
    "AllocatableResourcesResponse": {"devices": (1, "repeated ContainerDevices")},
    "PodResources": {
        "name": (1, _TEXT),
        "namespace": (2, _TEXT),
        "containers": (3, "repeated ContainerResources"),
    },
    "ContainerResources": {
        "name": (1, _TEXT),
        "devices": (2, "repeated ContainerDevices"),
        # 3 and 4: cpu_ids, memory.
        "dynamic_resources": (5, "repeated DynamicResource"),
    },
    # 3: topology.
    "ContainerDevices": {"resource_name": (1, _TEXT), "device_ids": (2, f"repeated {_TEXT}")},
    # 1: class_name, of Kubernetes 1.27 to 1.30 only.
    "DynamicResource": {
        "claim_name": (2, _TEXT),
        "claim_namespace": (3, _TEXT),
        "claim_resources": (4, "repeated ClaimResource"),
    },
    "ClaimResource": {
        # 1 and 3: cdi_devices, pool_name.
        "driver_name": (2, _TEXT),
        "device_name": (4, _TEXT),
    },
}
"""Number and type of each field, in the words of the definition."""


def __getattr__(name: str) -> Any:
    """Return the class of a message."""
    if name not in _CLASSES:
        raise AttributeError(name)
    return _CLASSES[name]


def _built() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="mig_manager/podresources.proto", package=_PACKAGE, syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, words) in fields.items():
            *repeated, kind = words.split()
            is_text = kind == _TEXT
            message.field.add(
                name=field_name,
                number=number,
                label=kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL,
                type=kinds.TYPE_STRING if is_text else kinds.TYPE_MESSAGE,
                type_name=None if is_text else f".{_PACKAGE}.{kind}",
            )
    # In a pool of their own: another library may bring a package ``v1``.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _built()
