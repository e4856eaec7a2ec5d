"""Find the NVML library of a driver below a root: in usual folders, and in a loader's cache."""

import contextlib
import os
import pathlib
import struct
from collections.abc import Iterator

from mig_manager.adapters.host import root_paths

NAME = "libnvidia-ml.so.1"

GKE_FOLDER = "home/kubernetes/bin/nvidia"
"""GKE's driver installer puts programs and libraries here on the host."""

_LIBRARY_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    # Debian, which chooses among drivers by links in /etc/alternatives.
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    f"{GKE_FOLDER}/lib64",
    # Talos' system extension.
    "usr/local/glibc/usr/lib",
    "usr/local/glibc/lib",
    "glibc/lib",
    "run/opengl-driver/lib",
    "usr/lib/wsl/lib",
)

_CACHE = "etc/ld.so.cache"
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = struct.Struct("=20sII20x")
_CACHE_ENTRY = struct.Struct("=iIIIQ")
"""``cache_file_new`` and ``file_entry_new`` of glibc's ``sysdeps/generic/dl-cache.h``."""
_CACHE_ARCHITECTURE = 0xFF00
"""In the flags of an entry; 0 is 32-bit x86, whose libraries no process of ours can load."""


def find(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the NVML libraries below a root: in the usual folders, then in its loader's cache."""
    yielded: set[pathlib.Path] = set()
    for path in (*(f"{folder}/{NAME}" for folder in _LIBRARY_FOLDERS), *_cached_libraries(root)):
        library = root_paths.resolve(root, path)
        if library is not None and library not in yielded and library.is_file():
            yielded.add(library)
            yield library


def _cached_libraries(root: pathlib.Path) -> Iterator[str]:
    """Yield the NVML libraries in the loader's cache, as seen from the root."""
    cache = root_paths.resolve(root, _CACHE)
    # If the cache is missing or of another libc, only the folders count.
    with contextlib.suppress(OSError, ValueError, struct.error):
        data = cache.read_bytes() if cache else b""
        # An older format may come first, for glibc before 2.2.
        data = data[data.index(_CACHE_MAGIC) :]
        _, count, _ = _CACHE_HEADER.unpack_from(data)
        for index in range(count):
            at = _CACHE_HEADER.size + index * _CACHE_ENTRY.size
            flags, name, path, _, _ = _CACHE_ENTRY.unpack_from(data, at)
            if flags & _CACHE_ARCHITECTURE and _text(data, name) == NAME:
                yield _text(data, path)


def _text(data: bytes, at: int) -> str:
    return os.fsdecode(data[at : data.index(b"\0", at)])
