"""Where NVIDIA's driver has its programs and libraries, below the root of any file system.

That root is this machine's, a host's that is mounted into our container, or a driver container's.
"""

import os
import pathlib
import struct
from collections.abc import Iterator

LIBRARY = "libnvidia-ml.so.1"

GKE = "home/kubernetes/bin/nvidia"
"""GKE's driver installer puts programs and libraries here on the host."""

PROGRAM_FOLDERS = (
    "usr/bin",
    "usr/sbin",
    "bin",
    "sbin",
    "usr/local/bin",
    # Where the GPU operator's toolkit container puts its own on the host.
    "usr/local/nvidia/toolkit",
    f"{GKE}/bin",
    # NixOS, and Windows Subsystem for Linux.
    "run/current-system/sw/bin",
    "usr/lib/wsl/lib",
)

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
    f"{GKE}/lib64",
    # Talos' system extension.
    "usr/local/glibc/usr/lib",
    "usr/local/glibc/lib",
    "glibc/lib",
    "run/opengl-driver/lib",
    "usr/lib/wsl/lib",
)

_MAX_LINKS = 40
"""As many as the kernel follows in one path (``path_resolution(7)``)."""

_CACHE = "etc/ld.so.cache"
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = struct.Struct("=20sII20x")
_CACHE_ENTRY = struct.Struct("=iIIIQ")
"""``cache_file_new`` and ``file_entry_new`` of glibc's ``sysdeps/generic/dl-cache.h``."""
_CACHE_ARCHITECTURE = 0xFF00
"""In the flags of an entry; 0 is 32-bit x86, whose libraries no process of ours can load."""


def inside(root: pathlib.Path, path: str | pathlib.PurePath) -> pathlib.Path | None:
    """Resolve a path as a process with this root would; None if it does not exist.

    Links stay below the root, absolute ones too, as after ``chroot(2)``.

    Args:
        root: The path of that root in our own file system.
        path: As seen from the root.
    """
    remaining = list(reversed(pathlib.PurePosixPath(path).parts))
    place: list[str] = []
    links = 0
    while remaining:
        part = remaining.pop()
        if part in ("/", "//", ".", ".."):
            place = place[:-1] if part == ".." else place if part == "." else []
            continue
        target = _link(root.joinpath(*place, part))
        if target is None:
            place.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            return None
        remaining += reversed(pathlib.PurePosixPath(target).parts)
    found = root.joinpath(*place)
    return found if os.path.lexists(found) else None


def libraries(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the NVML libraries below a root, best first, without links.

    Those in the usual folders come before those in the loader's cache of that root.
    """
    paths = [f"{folder}/{LIBRARY}" for folder in _LIBRARY_FOLDERS]
    found: list[pathlib.Path] = []
    for place in (*paths, *_cached(root)):
        library = inside(root, place)
        if library is not None and library not in found and library.is_file():
            found.append(library)
            yield library


def _cached(root: pathlib.Path) -> Iterator[str]:
    """Yield the NVML libraries in the loader's cache, as seen from the root."""
    cache = inside(root, _CACHE)
    try:
        data = cache.read_bytes() if cache else b""
        # An older format may come first (glibc before 2.2 reads that).
        data = data[data.index(_CACHE_MAGIC) :]
        _, count, _ = _CACHE_HEADER.unpack_from(data)
        for index in range(count):
            at = _CACHE_HEADER.size + index * _CACHE_ENTRY.size
            flags, name, path, _, _ = _CACHE_ENTRY.unpack_from(data, at)
            if flags & _CACHE_ARCHITECTURE and _text(data, name) == LIBRARY:
                yield _text(data, path)
    except (OSError, ValueError, struct.error):
        # No cache, or one of another libc: only the folders count.
        return


def _text(data: bytes, at: int) -> str:
    return os.fsdecode(data[at : data.index(b"\0", at)])


def _link(path: pathlib.Path) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - the text as it is
    except OSError:
        return None
