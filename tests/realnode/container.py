"""One container of our image, started by runc as a manifest says, without a cluster around it."""

import contextlib
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from tests.realnode import images
from tests.rigs import api_objects, programs
from tests.rigs.shipped import overlays

_SYSTEM = {
    "/proc": ("proc", "proc", []),
    "/dev": ("tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
    "/dev/pts": ("devpts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666"]),
    "/sys": ("sysfs", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
}
"""What every container runtime mounts: type, source and options by place."""


class Container:
    """A running container; what it says is in a file.

    Args:
        state: Where runc keeps its notes.
        name: Of the container, for runc.
        process: Runs as long as the container, and ends with its exit status.
    """

    def __init__(self, state: pathlib.Path, name: str, process: subprocess.Popen[bytes]) -> None:
        self._state = state
        self._name = name
        self.process = process

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command beside the agent, in its environment."""
        return self._runc("exec", self._name, *command)

    def terminate(self) -> int:
        """Send SIGTERM to the first process; return the exit status."""
        self._runc("kill", self._name, "TERM")
        return self.process.wait(60)

    def _runc(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return programs.run(programs.path_or_skip("runc"), f"--root={self._state}", *arguments)


@contextlib.contextmanager
def running(
    image: images.MountedImage,
    overlay: overlays.Overlay,
    folder: pathlib.Path,
    environ: Mapping[str, str],
) -> Iterator[Container]:
    """Run an image's own command, confined as an overlay's container, for the body.

    It has the network of this thread; each volume is the folder of its name.

    Args:
        image: What to run.
        overlay: Whose environment, rights and volumes the container gets.
        folder: For the volumes, runc's notes and the output in ``log``.
        environ: Variables beside those of image and overlay.
    """
    bundle, state, name = folder / "bundle", folder / "runc", f"mig-manager-{os.getpid()}"
    for each in (bundle, *(folder / each["name"] for each in overlay.container["volumeMounts"])):
        each.mkdir(exist_ok=True)
    variables = [f"{key}={value}" for key, value in {**overlay.environ, **environ}.items()]
    document = _document(image, overlay.container, folder, name)
    document["process"]["env"] = [*image.environ, *variables]
    (bundle / "config.json").write_text(json.dumps(document))
    runc = [programs.path_or_skip("runc"), f"--root={state}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*runc, "run", f"--bundle={bundle}", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield Container(state, name, process)
    finally:
        subprocess.run([*runc, "delete", "--force", name], check=False, capture_output=True)
        process.wait(60)


def _document(
    image: images.MountedImage, container: api_objects.Object, folder: pathlib.Path, name: str
) -> dict[str, Any]:
    """Return runc's config.json, without the environment."""
    rights = container["securityContext"]
    added = [f"CAP_{each}" for each in rights["capabilities"].get("add") or ()]
    assert rights["capabilities"]["drop"] == ["ALL"]
    system = [
        {"destination": place, "type": kind, "source": source, "options": options}
        for place, (kind, source, options) in _SYSTEM.items()
    ]
    volumes = [
        {
            "destination": each["mountPath"],
            "type": "bind",
            "source": str(folder / each["name"]),
            "options": ["rbind", "ro" if each.get("readOnly") else "rw"],
        }
        for each in container["volumeMounts"]
    ]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(image.root), "readonly": rights["readOnlyRootFilesystem"]},
        "process": {
            "user": {"uid": rights["runAsUser"], "gid": 0},
            "args": image.command,
            "cwd": "/",
            "noNewPrivileges": not rights["allowPrivilegeEscalation"],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), added),
        },
        "mounts": [*system, *volumes],
        "linux": {
            "namespaces": [{"type": each} for each in ("pid", "ipc", "uts", "mount")],
            "cgroupsPath": f"/{name}",
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }
