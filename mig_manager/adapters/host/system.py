"""What the operating system tells of itself."""

import pathlib

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
"""Another UUID after each boot (``proc_sys_kernel(5)``); containers see that of their host."""


def boot_id(path: pathlib.Path = _BOOT_ID) -> str:
    """Return what tells this boot from others; empty where the system does not say."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""
