"""The environment of this process, and the layout file that comes with the program.

Linters ban the environment in every other module.
"""

import os
import pathlib
from collections.abc import Mapping

_PACKAGE = pathlib.Path(__file__).parents[2]


def environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def packaged_config() -> pathlib.Path:
    """Return the layout file that comes with the program.

    A wheel carries it inside the package; a source checkout has it beside the package.
    """
    inside = _PACKAGE / "profiles" / "mig-parted.yaml"
    return inside if inside.exists() else _PACKAGE.parent / "profiles" / "mig-parted.yaml"
