"""A ``/proc`` of a test's own making."""

import pathlib
from collections.abc import Mapping


class ProcTree:
    """A folder that looks like ``/proc`` to code that looks for GPU processes."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)

    def add(
        self, pid: int, *links: str, name: str = "python3", cgroup: str = "0::/", parent: int = 1
    ) -> pathlib.Path:
        """Add a process with these files open; return its folder."""
        process = self.root / str(pid)
        (process / "fd").mkdir(parents=True)
        for number, link in enumerate(links):
            (process / "fd" / str(number)).symlink_to(link)
        (process / "comm").write_bytes(name.encode() + b"\n")
        (process / "cgroup").write_text(f"{cgroup}\n")
        (process / "stat").write_bytes(b"%d (%s) S %d 1 1" % (pid, name.encode(), parent))
        return process

    def add_capabilities(self, minor: int, caps: Mapping[str, int], *, modify: int = 1) -> None:
        """Add a GPU's instances, such as ``gi3`` or ``gi3/ci0``, with these cap numbers."""
        for place, cap in caps.items():
            self._add_capability_file(
                f"gpu{minor}/mig/{place}/access", cap, mode=0o444, modify=modify
            )

    def add_right(self, name: str, cap: int, *, mode: int) -> None:
        """Add the right to ``config`` or ``monitor`` all instances, with a cap number."""
        self._add_capability_file(f"mig/{name}", cap, mode=mode, modify=1)

    def add_drm(self, pci_address: str, *names: str) -> None:
        """Add a PCI device with these nodes in ``/dev/dri`` to the ``sys`` beside."""
        for name in names:
            folder = self.root.parent / "sys/bus/pci/devices" / pci_address / "drm" / name
            folder.mkdir(parents=True)

    def add_devices(
        self, characters: Mapping[str, int], *, blocks: Mapping[str, int] | None = None
    ) -> None:
        """Add drivers of devices by name, with their major numbers."""
        lines = ["Character devices:", *(f"{each:3} {name}" for name, each in characters.items())]
        lines += ["", "Block devices:"]
        lines += [f"{each:3} {name}" for name, each in (blocks or {}).items()]
        (self.root / "devices").write_text("\n".join(lines) + "\n")

    def load_modules(self, **users: int) -> None:
        """Have only these kernel modules loaded, with the number of users of each."""
        lines = [f"{name} 4096 {count} - Live 0x0" for name, count in users.items()]
        (self.root / "modules").write_text("\n".join(lines) + "\n")

    def _add_capability_file(self, place: str, cap: int, *, mode: int, modify: int) -> None:
        path = self.root / "driver/nvidia/capabilities" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"DeviceFileMinor: {cap}\nDeviceFileMode: {mode}\nDeviceFileModify: {modify}\n"
        )
