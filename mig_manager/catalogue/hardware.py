"""Find GPU products by name, and make idle GPUs of them.

Only the sandbox and commands with ``--gpu`` depend on it: on a real node the driver reports these
facts.
"""

import dataclasses
import fnmatch
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.catalogue import product_table
from mig_manager.core import messages, model, profile_name
from mig_manager.core.layout import gpu_selectors

_COUNT_DIGITS = 5  # in a number of GPUs: long numbers take long
MAX_GPUS = 16  # GPUs of one simulated node; no machine in the field has more
_SPEC_FIELDS = [each.name for each in dataclasses.fields(model.GpuInstanceProfile)]

_DEFAULTS = {
    "a100": "a100-sxm4-40gb",
    "a100-40gb": "a100-sxm4-40gb",
    "a100-80gb": "a100-sxm4-80gb",
    "a800": "a800-sxm4-80gb",
    "gh200": "gh200-96gb",
    "h100": "h100-sxm5-80gb",
    "h100-80gb": "h100-sxm5-80gb",
    "rtx-pro-6000": "rtx-pro-6000-blackwell-server",
    "rtx-pro-6000-blackwell": "rtx-pro-6000-blackwell-server",
}
"""The most common product of a name that several products share."""


def products() -> Mapping[str, product_table.Product]:
    """Return every known product by key, in the order of the table."""
    return {key: _of_key(key) for key in product_table.rows()}


def find(name: str) -> product_table.Product:
    """Return the product of that name; UsageError if it is unknown or ambiguous.

    The name is a key or an NVML name, case-insensitive, with or without ``NVIDIA``. It can also be
    the first words of a single product, such as ``B300``, or a family such as ``A100``, which
    means its most common product.
    """
    words = _normal(name)
    keys_by_name = _names()
    if words in _DEFAULTS:
        return _of_key(_DEFAULTS[words])
    if words in keys_by_name:
        return _of_key(keys_by_name[words])
    keys = _beginning_with(words)
    if len(keys) == 1:
        return _of_key(*keys)
    if keys:
        raise errors.UsageError(f"GPU {name!r} is ambiguous: {', '.join(sorted(keys))}")
    names = [each.upper() for each in (*_DEFAULTS, *keys_by_name)]
    # Longer names, else of the same model, else of the same letters.
    beginnings = [re.findall(part, words.upper())[0] for part in (".*", "[A-Z]*[0-9]*", "[A-Z]*")]
    alike = ([each for each in names if each.startswith(beginning)] for beginning in beginnings)
    hint = messages.did_you_mean(words, next(filter(None, alike), ()))
    remedy = "" if hint else f"Known are {', '.join(product_names())}."
    raise errors.UsageError(f"unknown GPU {name!r}{hint}", remedy=remedy)


def of_gpu(pci_device_id: int, name: str, memory_mib: int) -> product_table.Product | None:
    """Return the product with this PCI device id, and the most similar name and memory."""
    alike = [each for each in products().values() if pci_device_id in each.pci_device_ids]

    def distance(product: product_table.Product) -> tuple[bool, int]:
        return name not in product.names, abs(product.memory_mib - memory_mib)

    return min(alike, key=distance, default=None)


def _beginning_with(words: str) -> set[str]:
    """Return the keys of the products whose names begin with these whole words, normalised.

    ``L4`` is not ``L40``, and ``A10`` is not ``A100``.
    """
    return {key for name, key in _names().items() if words and name.startswith(f"{words}-")}


def match(pattern: str) -> tuple[product_table.Product, ...]:
    """Return the products that a name or a glob selects; UsageError if none.

    A family selects all its products. Of products with the same PCI id, a family or a glob selects
    the first: the others are rare.
    """
    words = _normal(pattern)
    if set("*?[") & set(pattern):
        keys = {key for name, key in _names().items() if fnmatch.fnmatchcase(name, words)}
        if not keys:
            raise errors.UsageError(f"no known GPU matches {pattern!r}")
    else:
        is_one = words in _names() and words not in _DEFAULTS
        keys = set() if is_one else _beginning_with(words)
        if not keys:
            return (find(pattern),)
    first: dict[tuple[int, ...], product_table.Product] = {}
    for product in products().values():
        if product.key in keys:
            first.setdefault(product.pci_device_ids, product)
    return tuple(first.values())


def parse_node(spec: str) -> tuple[product_table.Product, ...]:
    """Return the GPUs of a node such as ``8xA100-SXM4-40GB`` or ``4xA100-SXM4-80GB+2xA30``.

    Captured GPUs are a JSON list of rows, one for each: ``captured.rows``.

    Raises:
        UsageError: The text is malformed, a product is unknown or cannot be simulated, or the
            number of GPUs is not 1 to ``MAX_GPUS``.
    """
    if spec.startswith("["):
        return tuple(_simulatable(product_table.of_row(raw)) for raw in json.loads(spec))
    gpus: list[product_table.Product] = []
    for part in spec.split("+"):
        matched = re.fullmatch(r"\s*(?:(\d+)\s*[xX]\s*)?(\S.*?)\s*", part)
        if matched is None or "*" in matched[2]:
            problem = f"malformed node {spec!r}: write '8xA100-SXM4-40GB' or '4xH100+2xA30'"
            raise errors.UsageError(problem)
        count = int((matched[1] or "1")[:_COUNT_DIGITS])
        if not 1 <= len(gpus) + count <= MAX_GPUS or count == 0:
            raise errors.UsageError(f"invalid node {spec!r}: a node has 1 to {MAX_GPUS} GPUs")
        gpus += [_simulatable(find(matched[2]))] * count
    return tuple(gpus)


def template(product: product_table.Product, index: int = 0) -> model.Gpu:
    """Return an idle GPU of this product; UsageError if its placements are unknown."""
    return _idle(_simulatable(product), product.profiles, index)


def _idle(
    product: product_table.Product, rows: Iterable[model.GpuInstanceProfile], index: int = 0
) -> model.Gpu:
    mode = model.MigMode.DISABLED if product.is_mig_capable else None
    return model.Gpu(
        index=index,
        uuid=f"GPU-{index:08x}-0000-0000-0000-000000000000",
        name=product.name,
        architecture=product.architecture,
        pci_address=f"00000000:{index + 1:02x}:00.0",
        pci_device_id=product.pci_device_ids[0],
        pci_subsystem_id=0,
        memory_mib=product.memory_mib,
        current_mode=mode,
        pending_mode=mode,
        mode_change_needs_reset=product.mode_needs_reset,
        # Dataclasses of different types are never equal.
        profiles=tuple(
            model.GpuInstanceProfile(**{name: getattr(row, name) for name in _SPEC_FIELDS})
            for row in rows
        ),
        gpu_instances=(),
        is_template=True,
    )


def templates(patterns: Iterable[str], *, warn: Callable[[str], object]) -> tuple[model.Gpu, ...]:
    """Return one idle GPU of every product that names or globs select; warn of omitted products.

    Raises:
        UsageError: A pattern selects no product, or no selected product can be simulated.
    """
    return tuple(template(product) for product in _select_products(patterns, warn))


def kinds(
    patterns: Iterable[str], *, warn: Callable[[str], object]
) -> tuple[gpu_selectors.GpuKind, ...]:
    """Return the kinds of the products with MIG, as ``templates``; UsageError if none has MIG.

    Of products with the same PCI id it returns the first: a layout's filter cannot distinguish
    them.
    """
    selected = _select_products(patterns, warn)
    by_ids: dict[tuple[int, ...], product_table.Product] = {}
    for product in selected:
        first = by_ids.setdefault(product.pci_device_ids, product)
        if product.is_mig_capable and first is not product:
            warn(f"{product.key} is left out: it has the PCI id of {first.key}")
    gpu_kinds = tuple(
        gpu_selectors.GpuKind(
            device_ids=product.pci_device_ids,
            name=product.name,
            profiles=template(product).profiles or (),
        )
        for product in by_ids.values()
        if product.is_mig_capable
    )
    if not gpu_kinds:
        names = ", ".join(product.name for product in selected)
        raise errors.UsageError(f"{names} has no MIG")
    return gpu_kinds


def product_names() -> tuple[str, ...]:
    """Return the short names, as in help texts, of products with MIG and known slices."""
    return tuple(product.key.upper() for product in _known_products())


@functools.cache
def known_gpus() -> Sequence[model.Gpu]:
    """Return an idle GPU of every product with known or published profiles."""
    unplaced = [each for each in products().values() if each.not_simulatable]
    return [
        *map(template, _known_products()),
        *(
            _idle(each, map(_published_profile, product_table.rows()[each.key]["profiles"]))
            for each in unplaced
        ),
    ]


def _published_profile(raw: Mapping[str, Any]) -> model.GpuInstanceProfile:
    """Return a profile from its published name and count, which suffice to check layouts.

    Unpublished placements are assumed to be adjacent. Other unknown numbers are zero.
    """
    profile = profile_name.parse(raw["name"])
    size = profile.gpu_slices
    return model.GpuInstanceProfile(
        profile=profile,
        enum_index=raw["enum"],
        profile_id=raw["id"] or 0,
        max_instances=raw["max"],
        multiprocessors=raw["sms"] or 0,
        engines=model.Engines(),
        memory_mib=raw["memory_mib"] or 0,
        placements=product_table.placements(raw["placements"])
        if raw["placements"]
        else tuple(model.Placement(nth * size, size) for nth in range(raw["max"])),
    )


def _simulatable(product: product_table.Product) -> product_table.Product:
    if product.not_simulatable:
        raise errors.UsageError(f"{product.name} cannot be simulated: {product.not_simulatable}")
    return product


def _normal(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().casefold()).removeprefix("nvidia-")


@functools.cache
def _names() -> Mapping[str, str]:
    """Return the key of every name's product, the first in the table."""
    names = {key: key for key in product_table.rows()}
    for key, raw in product_table.rows().items():
        for name in raw["names"]:
            names.setdefault(_normal(name), key)
    return names


@functools.cache
def _of_key(key: str) -> product_table.Product:
    return product_table.of_row(product_table.rows()[key])


def _known_products() -> list[product_table.Product]:
    every = products().values()
    return [each for each in every if each.is_mig_capable and not each.not_simulatable]


def _select_products(
    patterns: Iterable[str], warn: Callable[[str], object]
) -> Sequence[product_table.Product]:
    selected: dict[str, product_table.Product] = {}
    for pattern in patterns:
        matching = match(pattern)
        if len(matching) > 1 and _normal(pattern) in _DEFAULTS:
            warn(f"{pattern} means {', '.join(product.key.upper() for product in matching)}")
        selected |= {product.key: product for product in matching}
    simulatable = [product for product in selected.values() if not product.not_simulatable]
    for product in selected.values():
        if simulatable and product not in simulatable:
            warn(f"{product.name} is left out: {product.not_simulatable}")
    # If none can be simulated, the first one's error has the reason.
    return simulatable or tuple(selected.values())
