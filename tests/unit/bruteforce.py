"""Every layout that a GPU can have, found by trying all placements."""

import dataclasses
from collections.abc import Iterable, Iterator

from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model
from tests.rigs.node import driver_rules

Counts = tuple[int, ...]  # how many of each profile, in the order in which the GPU lists them


def template(product: product_table.Product) -> model.Gpu:
    return dataclasses.replace(
        hardware.template(product),
        current_mode=model.MigMode.ENABLED,
        pending_mode=model.MigMode.ENABLED,
    )


def placeable(gpu: model.Gpu) -> frozenset[Counts]:
    """Return every layout that fits: profile by profile, every subset of its placements."""
    specs = gpu.profiles or ()
    states: set[tuple[Counts, frozenset[int]]] = {((), frozenset())}
    for spec in specs:
        spans = [frozenset(range(place.start, place.end)) for place in spec.placements]
        states = {
            (
                (*counts, number),
                occupied,
            )
            for counts, before in states
            for number, occupied in set(_subsets(spans, before))
        }
    every_counts = {counts for counts, _ in states}
    return frozenset(
        c for c in every_counts if driver_rules.pool_allows(gpu, _instances(specs, c))
    )


def one_more(counts: Counts) -> Iterator[Counts]:
    for index, count in enumerate(counts):
        yield (*counts[:index], count + 1, *counts[index + 1 :])


def _subsets(
    spans: list[frozenset[int]], occupied: frozenset[int], number: int = 0
) -> Iterator[tuple[int, frozenset[int]]]:
    yield number, occupied
    for index, span in enumerate(spans):
        if not span & occupied:
            yield from _subsets(spans[index + 1 :], occupied | span, number + 1)


def _instances(
    specs: Iterable[model.GpuInstanceProfile], counts: Counts
) -> Iterator[model.Profile]:
    for spec, count in zip(specs, counts, strict=True):
        yield from [spec.profile] * count
