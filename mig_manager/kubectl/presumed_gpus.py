"""The GPUs of a node whose agent has published none, by the labels of GPU feature discovery."""

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.fleet import node_reports
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import discovery_labels


def of(report: node_reports.NodeReport) -> tuple[model.ObservedGpus, str]:
    """Return a node's GPUs according to its labels, presumed unpartitioned, and a note."""
    from mig_manager.catalogue import hardware  # noqa: PLC0415 - where nothing is published

    labels = report.node.view.labels
    name = labels.get(discovery_labels.PRODUCT, "").removesuffix("-SHARED")
    count = labels.get(discovery_labels.COUNT, "1")
    # With strategy single, GPU feature discovery counts MIG devices, not GPUs.
    if not name or "-MIG-" in name or count == "0":
        return model.NO_GPUS, "no agent and no label shows its GPUs"
    is_count = count.isascii() and count.isdecimal() and len(count) <= len(str(hardware.MAX_GPUS))
    number = int(count) if is_count else 1
    try:
        product = hardware.find(name)
        gpus = model.ObservedGpus(
            hardware.template(product, index) for index in range(min(number, hardware.MAX_GPUS))
        )
    except errors.UsageError as error:
        return model.NO_GPUS, f"no agent shows its GPUs, and by its label: {error.message}"
    how = "with MIG devices" if is_partitioned(report) else "presumed not partitioned"
    return gpus, (
        f"no agent shows its GPUs; by its labels it has {len(gpus)}x {product.name}, {how}"
    )


def is_partitioned(report: node_reports.NodeReport) -> bool:
    """Return whether a node shows MIG devices, by a resource or a label: of another manager."""
    view = report.node.view
    advertised = {**view.capacity, **view.allocatable}
    labels = view.labels.items()
    return any(resources.is_mig(name) and count for name, count in advertised.items()) or any(
        discovery_labels.MIG_DEVICES.fullmatch(key) and value != "0" for key, value in labels
    )
