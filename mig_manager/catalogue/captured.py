"""Captured GPUs as rows of the catalogue, in the form of ``hardware.json``.

``mig-manager acceptance`` writes captures. Facts that a capture lacks come from the product with
the same PCI id, or are derived from the others. A row lists them as ``inferred``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model, profile_name
from mig_manager.core.files import checkpoint

_GRIDS = {
    8: product_table.Grid.SEVEN_SLICE,
    4: product_table.Grid.FOUR_SLICE,
    12: product_table.Grid.TWELVE_SLICE,
}
_GENERATION = "ada"  # for an unknown GPU: MIG has no rules of its own for it
_NO_PROFILES = "its driver lists no profiles while MIG is off; capture it with MIG enabled"


def rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each reachable GPU of a capture, in their order.

    Raises:
        ValueError: The data is no capture, a value is invalid, or no GPU was reachable.
        LookupError: A key is missing. TypeError: A value has another type.
    """
    if data.get("kind") != "Acceptance":
        raise ValueError("not a capture by 'mig-manager acceptance'")
    driver = str(data["driverVersion"])
    captured = [_row(gpu, driver) for gpu in data["gpus"] if gpu["unreachable"] is None]
    for row in captured:
        product_table.of_row(row)
    if not captured:
        raise ValueError("a capture without a reachable GPU")
    if len(captured) > hardware.MAX_GPUS:
        raise ValueError(f"a capture of more than {hardware.MAX_GPUS} GPUs")
    return captured


def _row(gpu: Mapping[str, Any], driver: str) -> dict[str, Any]:
    pci = gpu["pciDeviceId"]
    name = gpu["name"]
    memory_mib = int(gpu["memoryMib"])
    product = hardware.of_gpu(int(pci, 16), name, memory_mib)
    is_capable = gpu["migMode"] is not None
    profiles = [
        _profile(each, product)
        for each in gpu["profiles"] or ()
        if each["enum"] in profile_name.GPU_INSTANCE_PROFILES
    ]
    spans = [span for each in profiles for span in _spans(each["placements"])]
    slices = max((span.end for span in spans), default=0)
    grid = product.grid if product else _GRIDS.get(slices)
    generation = gpu["architecture"]
    if generation == model.Architecture.OTHER.value:
        generation = product.generation if product else _GENERATION
    needs_reset = gpu["modeChangeNeedsReset"] is True
    maximum = max((len(each["placements"].split()) for each in profiles), default=0)
    row = {
        "key": product.key if product else "captured",
        "names": [name],
        "pci": [pci],
        "architecture": generation,
        "memory_total_mib": memory_mib,
        "mig_capable": is_capable,
        "memory_slices": slices,
        "max_instances": product.max_instances if product else maximum,
        "grid": grid.value if grid else None,
        "mode": {
            "needs_reset": needs_reset,
            "persists": product.mode_persists if product else needs_reset,
        },
        "sources": {"profiles": f"capture by mig-manager acceptance, driver {driver}"},
        "profiles": profiles,
    }
    return row | ({"not_simulatable": _NO_PROFILES} if is_capable and not profiles else {})


def _profile(each: Mapping[str, Any], product: product_table.Product | None) -> dict[str, Any]:
    captured = each["computeProfiles"]
    row = {
        "name": each["name"],
        "enum": int(each["enum"]),
        "id": int(each["id"]),
        "slices": int(each["slices"]),
        "max": int(each["maxInstances"]),
        "sms": int(each["multiprocessors"]),
        "engines": list(map(int, each["engines"])),
        "memory_mib": int(each["memoryMib"]),
        "placements": " ".join(map(str, each["placements"])),
        "compute": _infer_compute_profiles(each, product)
        if captured is None
        else list(map(_compute, captured)),
    }
    return row | ({"inferred": ["compute"]} if captured is None else {})


def _compute(each: Mapping[str, Any]) -> list[Any]:
    size, maximum = int(each["slices"]), int(each["maxInstances"])
    spans = each["placements"]
    starts = (
        [nth * size for nth in range(maximum)]
        if spans is None
        else [span.start for span in _spans(" ".join(spans))]
    )
    return [
        int(each["id"]),
        size,
        maximum,
        int(each["multiprocessors"]),
        " ".join(map(str, starts)),
    ]


def _infer_compute_profiles(
    each: Mapping[str, Any], product: product_table.Product | None
) -> list[list[Any]]:
    """Return the compute-instance profiles of the product, or one of a slice and one of all."""
    for row in product.profiles if product else ():
        if (row.enum_index, row.profile.gpu_slices) == (each["enum"], each["slices"]):
            return [
                [
                    compute.profile_id,
                    compute.slices,
                    compute.max_instances,
                    compute.multiprocessors,
                    " ".join(str(span.start) for span in compute.placements),
                ]
                for compute in row.compute
            ]
    whole, processors = int(each["slices"]), int(each["multiprocessors"])
    return [
        [
            checkpoint.COMPUTE_PROFILES.get(size, len(checkpoint.COMPUTE_PROFILES)),
            size,
            whole // size,
            processors * size // whole,
            " ".join(str(start) for start in range(0, whole - size + 1, size)),
        ]
        for size in sorted({1, whole})
    ]


def _spans(text: str) -> Sequence[model.Placement]:
    return product_table.placements(text)
