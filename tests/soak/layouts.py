"""The layouts that the soak requests: as plain data, their files, and what they mean on GPUs.

Nothing here asks the planner or the parser, because they are what is tried.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tests.rigs import layout_table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """The devices of one GPU in a layout."""

    devices: Mapping[str, int] | None  # compute instances by name; None: MIG off
    is_feasible: bool = True


OFF = GpuChoice(devices=None)
BARE = GpuChoice(devices={})

CHOICES: Mapping[str, Sequence[GpuChoice]] = {
    "a100-sxm4-40gb": (
        GpuChoice(devices={"1g.5gb": 7}),
        GpuChoice(devices={"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}),
        GpuChoice(devices={"3g.20gb": 2}),
        OFF,
        GpuChoice(devices={"1g.5gb": 4, "3g.20gb": 1}),
        GpuChoice(devices={"7g.40gb": 1}),
        GpuChoice(devices={"1c.3g.20gb": 3, "2g.10gb": 1}),
        GpuChoice(devices={"1g.5gb+me": 1, "2g.10gb": 2}),
        BARE,
        GpuChoice(devices={"1g.5gb": 8}, is_feasible=False),
        GpuChoice(devices={"1g.99gb": 1}, is_feasible=False),
    ),
    "h100-sxm5-80gb": (
        GpuChoice(devices={"1g.10gb": 7}),
        GpuChoice(devices={"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}),
        GpuChoice(devices={"3g.40gb": 2}),
        OFF,
        GpuChoice(devices={"1g.20gb": 4}),
        GpuChoice(devices={"1c.4g.40gb": 2, "1g.10gb": 3}),
        BARE,
        GpuChoice(devices={"4g.40gb": 2}, is_feasible=False),
    ),
    "a30": (
        GpuChoice(devices={"1g.6gb": 4}),
        GpuChoice(devices={"2g.12gb": 2}),
        OFF,
        GpuChoice(devices={"1g.6gb": 2, "2g.12gb": 1}),
        GpuChoice(devices={"1c.4g.24gb": 2}),
        BARE,
        GpuChoice(devices={"1g.6gb": 5}, is_feasible=False),
    ),
}
"""By product."""

Layout = tuple[GpuChoice | None, ...]
"""For each GPU by index; None: the layout does not speak of it."""

NAMES = ("a", "b", "c", "d")  # of the layouts that the layout file has
_RARELY, _OFTEN = 13, 6
"""Remainders of a pick that mean what the GPU cannot have, and nothing at all."""
UNKNOWN = "no-such-layout"
BROKEN = "version: v1\nmig-configs: {a: [\n"


def picked_layout(products: Sequence[str], picks: Sequence[int]) -> Layout:
    """Return the layout that numbers choose for these GPUs; it has one GPU at least."""
    choices: list[GpuChoice | None] = []
    for product, pick in zip(products, picks, strict=False):
        is_meant = pick % 20 != _RARELY
        offers = [choice for choice in CHOICES[product] if choice.is_feasible is is_meant]
        choices.append(None if pick % 10 == _OFTEN else offers[pick % len(offers)])
    return tuple(choices) if any(choices) else (OFF, *choices[1:])


def is_feasible(layout: Layout) -> bool:
    return all(choice is None or choice.is_feasible for choice in layout)


def document(layouts: Mapping[str, Layout]) -> str:
    return layout_table.render({name: _rule_lines(layout) for name, layout in layouts.items()})


def _rule_lines(layout: Layout) -> Iterator[str]:
    for at, choice in enumerate(layout):
        if choice is not None:
            yield layout_table.rule_line(f"[{at}]", choice.devices)
