"""The end of an unfinished change."""

import pytest

from mig_manager import errors
from tests.node import applying_rig


def refuse(node: applying_rig.Node, match: str = "is undone now") -> None:
    """Ask for an impossible layout, which undoes what was left unfinished."""
    with pytest.raises(errors.LayoutError, match=match):
        node.change_to("too-much")
