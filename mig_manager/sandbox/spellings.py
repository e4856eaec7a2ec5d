"""One spelling for the same simulated GPUs, so that they have one state file."""

import itertools

from mig_manager import errors
from mig_manager.catalogue import hardware


def of_node(spec: str) -> str:
    """Return the text of a node as ``8xA100-SXM4-40GB``, whatever its case, and by full names.

    The file of a capture, and a text that names no GPUs, stay as they are.
    """
    try:
        keys = [product.key for product in hardware.parse_node(spec)]
    except errors.UsageError:
        return spec
    return "+".join(f"{len([*run])}x{key.upper()}" for key, run in itertools.groupby(keys))
