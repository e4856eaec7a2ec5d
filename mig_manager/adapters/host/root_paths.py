"""Resolve paths below a root that is not this process's own."""

import os
import pathlib

_MAX_LINKS = 40  # as many as the kernel follows in one path (``path_resolution(7)``)


def resolve(root: pathlib.Path, path: str | pathlib.PurePath) -> pathlib.Path | None:
    """Resolve a path as a process with this root would; None if it does not exist.

    Links stay below the root, absolute ones too, as after ``chroot(2)``.
    """
    remaining = list(reversed(pathlib.PurePosixPath(path).parts))
    resolved: list[str] = []
    links = 0
    while remaining:
        part = remaining.pop()
        if part in ("/", "//", ".", ".."):
            resolved = resolved[:-1] if part == ".." else resolved if part == "." else []
            continue
        try:
            target = os.readlink(root.joinpath(*resolved, part))  # noqa: PTH115 - the text as it is
        except OSError:
            resolved.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            return None
        remaining += reversed(pathlib.PurePosixPath(target).parts)
    local_path = root.joinpath(*resolved)
    return local_path if os.path.lexists(local_path) else None
