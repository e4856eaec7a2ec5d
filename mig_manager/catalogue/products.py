"""GPUs by the name of their product: what validates and generates where no GPU is."""

import functools
from collections.abc import Callable, Iterable, Sequence

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.layout import generator

_EARLY_GB200_MIB = 189 * 1024
"""Pre-production units, whose profiles NVIDIA's default layouts still name
(``all-7g.189gb`` in gpu-operator's ``default-mig-parted-config``)."""


def templates(patterns: Iterable[str], *, warn: Callable[[str], object]) -> tuple[model.Gpu, ...]:
    """Return one idle GPU of each product that names or globs select; warn of each omitted one.

    UsageError if a pattern means no product, or nothing is known of any that they mean.
    """
    return tuple(hardware.template(product) for product in _chosen(patterns, warn))


def kinds(patterns: Iterable[str], *, warn: Callable[[str], object]) -> tuple[generator.Kind, ...]:
    """Return the kind of each product with MIG, as ``templates``; LayoutError if none has it."""
    products = _chosen(patterns, warn)
    found = tuple(
        generator.Kind(
            device_ids=product.pci_device_ids, profiles=hardware.template(product).profiles or ()
        )
        for product in products
        if product.is_mig_capable
    )
    if not found:
        names = ", ".join(product.name for product in products)
        raise errors.LayoutError(
            f"{names}: no MIG-capable product", reason=errors.Reason.NOT_MIG_CAPABLE
        )
    return found


def names() -> tuple[str, ...]:
    """Return the short name of every product with MIG whose slices are known."""
    return tuple(product.key for product in _known())


@functools.cache
def known() -> Sequence[model.Gpu]:
    """Return an idle GPU of every product whose profiles are known."""
    gb200 = hardware.template(hardware.find("gb200"))
    early = hardware.resized(gb200, memory_mib=_EARLY_GB200_MIB)
    return [*map(hardware.template, _known()), early]


def _known() -> list[hardware.Product]:
    every = hardware.products().values()
    return [each for each in every if each.is_mig_capable and not each.not_simulatable]


def _chosen(patterns: Iterable[str], warn: Callable[[str], object]) -> Sequence[hardware.Product]:
    found = {product.key: product for pattern in patterns for product in hardware.match(pattern)}
    known = [product for product in found.values() if not product.not_simulatable]
    for product in found.values():
        if known and product not in known:
            warn(f"{product.name} is left out: {product.not_simulatable}")
    # With nothing known, the first says why.
    return known or tuple(found.values())
