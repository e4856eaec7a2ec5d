"""The SPEC of ``--simulate``: a list of products, or a FILE that ``acceptance`` wrote."""

import contextlib
import hashlib
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from mig_manager import errors
from mig_manager.adapters.host import files
from mig_manager.catalogue import captured, hardware
from mig_manager.core.files import json_text
from mig_manager.sandbox.driver import states

_SUFFIX = ".json"
_FIELDS = {
    "nvmlInit": ("init_s",),
    "nvmlDeviceCreateGpuInstanceWithPlacement": ("create_gpu_instance_s",),
    "nvmlGpuInstanceDestroy": ("destroy_gpu_instance_s",),
    "nvmlGpuInstanceCreateComputeInstance": ("create_compute_instance_s",),
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": ("create_compute_instance_s",),
    "nvmlComputeInstanceDestroy": ("destroy_compute_instance_s",),
    "nvmlDeviceSetMigMode": ("mode_with_reset_s", "mode_without_reset_s"),
}
"""Fields of ``states.Latency`` by the function that they are the time of."""
_NOT_QUERIES = {*_FIELDS, "nvmlShutdown", "nvmlEventSetWait_v2"}


class SimulatedNode(NamedTuple):
    """A node to simulate."""

    spec: str  # for ``SharedState.create``
    latency: states.Latency


def node(spec: str) -> SimulatedNode:
    """Return the node of a text such as ``8xA100-SXM4-40GB``, or of the file of a capture.

    Raises:
        UsageError: The file is no capture.
        ConfigError: It cannot be read.
    """
    if not _is_capture(spec):
        return SimulatedNode(spec, states.Latency())
    path = pathlib.Path(spec)
    return SimulatedNode(json.dumps(rows(path)), states.Latency(**durations_s(path)))


def spelling(spec: str) -> str:
    """Return one spelling for the same simulated GPUs, so that they have one state file.

    Products have their keys, as in ``8xA100-SXM4-40GB``, whatever their case, and for full names.
    The file of a capture is named by its path, from whatever folder. A text that names no GPUs
    stays as it is.
    """
    if _is_capture(spec):
        path = pathlib.Path(spec).resolve()
        return f"{path.stem}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    try:
        keys = [product.key for product in hardware.parse_node(spec)]
    except errors.UsageError:
        return spec
    return "+".join(f"{len([*run])}x{key.upper()}" for key, run in itertools.groupby(keys))


def _is_capture(spec: str) -> bool:
    """Return whether a text is the path of a capture, and no list of products."""
    return spec.endswith(_SUFFIX)


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the catalogue's rows for the GPUs of a capture.

    Raises:
        UsageError: The file is no capture.
        ConfigError: It cannot be read.
    """
    with _parsing(path) as data:
        return captured.rows(data)


def durations_s(path: pathlib.Path) -> dict[str, float]:
    """Return the durations of a capture, by field of ``Latency``, without what was not called.

    Raises:
        UsageError: The file is no capture.
        ConfigError: It cannot be read.
    """
    with _parsing(path) as data:
        median_s = {row["function"]: float(row["medianMs"]) / 1000 for row in data["latencies"]}
    seconds: dict[str, float] = {}
    for function, fields in _FIELDS.items():
        for field in fields if function in median_s else ():
            seconds[field] = median_s[function]
    if queries := [each for name, each in median_s.items() if name not in _NOT_QUERIES]:
        seconds["query_s"] = statistics.median(queries)
    return seconds


@contextlib.contextmanager
def _parsing(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    text = files.SourceFile(path).read()
    try:
        with json_text.decoding("a capture by 'mig-manager acceptance'"):
            yield json_text.parse_object(text)
    except json.JSONDecodeError as error:
        raise errors.UsageError(f"{path} is not JSON: {error}") from error
    except ValueError as error:
        raise errors.UsageError(f"{path} is {error}") from error
