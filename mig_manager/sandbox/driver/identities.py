"""Identities of simulated devices: UUIDs, PCI addresses.

MIG UUIDs since R470 are a pure function of GPU, GPU instance and graphics engine, built as the
open kernel modules do (``gpu_uuid.c``): so a slot that is created again has its old UUID again.
"""

import dataclasses
import functools
import hashlib
import uuid

from mig_manager.catalogue import hardware
from mig_manager.sandbox.driver import rules, states

_NAMESPACE = bytes.fromhex("c816c9a3522456bf9d9aac7ea703fb5b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What never changes of one simulated GPU."""

    index: int
    product: hardware.Product
    uuid: str
    pci_bus: int
    is_swapped: bool
    serial_number: int
    """The 64-bit device identity burnt into a GPU, from which its UUIDs follow."""

    @property
    def pci_address(self) -> str:
        """Domain:bus:device.function as NVML spells it."""
        return f"00000000:{self.pci_bus:02X}:00.0"

    def row(self, profile_id: int) -> hardware.GpuProfile:
        """Return the profile with the driver's id.

        Raises:
            Refused: INVALID_ARGUMENT, this GPU has no such profile.
        """
        for row in self.product.profiles:
            if row.profile_id == profile_id:
                return row
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    def mig_uuid(self, instance: states.GpuInstance, compute: states.ComputeInstance) -> str:
        """Return the UUID of the MIG device of a compute instance."""
        engine = rules.physical_engine(self.product, instance.placement, compute.placement)
        tail = b"\x0bSMC" + _u32(instance.instance_id) + _u32(engine)
        return f"MIG-{_hashed(self.product, self.serial_number, tail)}"


def boards(spec: str, options: states.Options) -> tuple[Board, ...]:
    """Return the GPUs of a node, ascending by index.

    Raises:
        UsageError: The spec is no node.
    """
    return tuple(
        _board(index, product, options) for index, product in enumerate(hardware.parse_node(spec))
    )


def _board(index: int, product: hardware.Product, options: states.Options) -> Board:
    digest = hashlib.sha256(f"{options.seed}/{index}/{product.key}".encode()).digest()
    serial_number = int.from_bytes(digest[:8], "little")
    return Board(
        index=index,
        product=product,
        uuid=f"GPU-{_hashed(product, serial_number)}",
        pci_bus=7 + 8 * index,
        is_swapped=index in options.swapped_gpus,
        serial_number=serial_number,
    )


def _hashed(product: hardware.Product, serial_number: int, tail: bytes = b"") -> uuid.UUID:
    return _uuid((product.pci_device_ids[0] >> 16) & 0xFFFF, serial_number, tail)


@functools.lru_cache(maxsize=1024)
def _uuid(chip: int, serial_number: int, tail: bytes) -> uuid.UUID:
    text = b"NVIDIA GPU\x02" + chip.to_bytes(2, "little")
    text += b"\x08" + serial_number.to_bytes(8, "little") + tail
    digest = hashlib.sha1(_NAMESPACE + text, usedforsecurity=False).digest()
    return uuid.UUID(bytes=digest[:16], version=5)


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
