"""An amount of nodes: a number, or a percentage of a number of nodes, as ``maxUnavailable``."""

import re

_AMOUNT = re.compile(r"([1-9][0-9]{0,5})|(100|[1-9]?[0-9])%")


def parse(text: str) -> str:
    """Return an amount of nodes; ValueError if it is neither a number nor a percentage."""
    if not _AMOUNT.fullmatch(text):
        raise ValueError("is neither a number of nodes, at least 1, nor a percentage")
    return text


def scale(amount: str, nodes: int) -> int:
    """Return the amount for so many nodes: a percentage is rounded down, but at least one."""
    if amount.endswith("%"):
        return max(1, int(amount[:-1]) * nodes // 100)
    return int(amount)
