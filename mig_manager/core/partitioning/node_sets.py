"""Sets of nodes as bits of an integer, for comparisons of many pods with all nodes.

Bit 0 is the first node by name. An operation on sets of ten thousand nodes takes a microsecond.
"""

import bisect
import collections
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)


def of(positions: Iterable[int]) -> int:
    """Return the set of the nodes at these positions."""
    bits = bytearray()
    for position in positions:
        byte, bit = divmod(position, 8)
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        bits[byte] |= 1 << bit
    return int.from_bytes(bits, "little")


def each(nodes: int) -> Iterator[int]:
    """Yield the positions of the nodes of a set, ascending."""
    digits = bin(nodes)[:1:-1]
    position = digits.find("1")
    while position >= 0:
        yield position
        position = digits.find("1", position + 1)


def first(nodes: int) -> int:
    """Return the position of the first node of a set that is not empty."""
    return (nodes & -nodes).bit_length() - 1


def union(sets: Iterable[int]) -> int:
    """Return the nodes that are in any of the sets."""
    return functools.reduce(int.__or__, sets, 0)


def by_key(keys: Iterable[_Key]) -> dict[_Key, int]:
    """Return the sets of nodes with equal keys; the keys are in the order of the nodes."""
    positions: dict[_Key, list[int]] = collections.defaultdict(list)
    for position, key in enumerate(keys):
        positions[key].append(position)
    return {key: of(members) for key, members in positions.items()}


class Amounts:
    """The amounts of resources that nodes have; an amount that is not listed is 0."""

    def __init__(self, nodes: Sequence[Mapping[str, int]]) -> None:
        self._nodes = nodes
        self._fewer: dict[str, tuple[list[int], list[int]]] = {}
        """By resource: the amounts that nodes have, ascending, and the nodes with less than each;
        then all nodes."""

    def fewer(self, resource: str, amount: int) -> int:
        """Return the nodes that have less than an amount of a resource."""
        if resource not in self._fewer:
            sets = by_key(node.get(resource, 0) for node in self._nodes)
            amounts, below = sorted(sets), [0]
            for each_amount in amounts:
                below.append(below[-1] | sets[each_amount])
            self._fewer[resource] = amounts, below
        amounts, below = self._fewer[resource]
        return below[bisect.bisect_left(amounts, amount)]

    def of(self, position: int) -> Mapping[str, int]:
        """Return the amounts of one node."""
        return self._nodes[position]

    def short(self, needs: Iterable[tuple[str, int]]) -> int:
        """Return the nodes that have too little of any resource."""
        nodes = 0
        for resource, amount in needs:
            nodes |= self.fewer(resource, amount)
        return nodes
