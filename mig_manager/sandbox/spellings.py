"""One spelling for the same simulated GPUs, so that they have one state file."""

import hashlib
import itertools
import pathlib

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.sandbox import replay


def of_node(spec: str) -> str:
    """Return the text of a node as ``8xA100-SXM4-40GB``, whatever its case, and by full names.

    The file of a capture is named by its path, from whatever folder. A text that names no GPUs
    stays as it is.
    """
    if replay.is_capture(spec):
        path = pathlib.Path(spec).resolve()
        return f"{path.stem}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    try:
        keys = [product.key for product in hardware.parse_node(spec)]
    except errors.UsageError:
        return spec
    return "+".join(f"{len([*run])}x{key.upper()}" for key, run in itertools.groupby(keys))
