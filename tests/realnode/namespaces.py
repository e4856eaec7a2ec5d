"""Namespaces for a cluster of real programs: a network for the control plane, a machine a node.

Nothing of the machine is changed but what lies in the folder, and cgroups below one of ours; all
processes of a node end with its first, which ends when its standard input closes.
"""

import contextlib
import ctypes
import functools
import os
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence

from tests.rigs import waiting

_CLONE_NEWNET = 0x40000000
_CONTROLLERS = pathlib.Path("/sys/fs/cgroup")
_SELF = pathlib.Path(__file__).parent
_BRIDGE = "nodes"
CONTROL_IP = "10.77.0.1"
IMAGE_CACHE = "mig-manager-realnode"
"""The name of the folder, in the user's cache, where images are built and kept."""
_PROGRAMS = (
    *("buildah", "containerd", "ctr", "ip", "iptables", "kubectl", "mmdebstrap", "nsenter"),
    *("pkill", "runc", "unshare"),
)


class Namespaces:
    """The namespaces of one first process, and programs started in them."""

    def __init__(self, name: str, command: Sequence[str], log: pathlib.Path) -> None:
        self.name = name
        with log.open("ab") as output:
            self._first = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """The first process of the namespaces, as our own namespace numbers it."""
        unshare = pathlib.Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        return int(unshare.read_text().split()[0])

    @property
    def has_ended(self) -> bool:
        """Whether the first process is no more; then its log says why."""
        return self._first.poll() is not None

    def enter(self, *command: str | pathlib.Path) -> list[str]:
        """Return the command that runs another within the namespaces."""
        into = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*into, "--", *map(str, command)]

    def run(self, *command: str | pathlib.Path) -> str:
        done = subprocess.run(
            self.enter(*command), capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{command} on {self.name}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self, log: pathlib.Path, *command: str | pathlib.Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                self.enter(*command),
                # The root is read-only, and /tmp a part of it.
                env=os.environ | {"TMPDIR": "/run"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def end(self) -> None:
        """End every process in the namespaces."""
        assert self._first.stdin is not None
        self._first.stdin.close()
        self._first.wait(60)


def own_network() -> None:
    """Move this thread, and what it starts, to an empty network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    for command in (
        "ip link set lo up",
        f"ip link add {_BRIDGE} type bridge",
        f"ip addr add {CONTROL_IP}/16 dev {_BRIDGE}",
        f"ip link set {_BRIDGE} up",
    ):
        subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def another_network() -> Iterator[None]:
    """Move this thread to another network for the body: a cluster may be in its first one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with pathlib.Path("/proc/thread-self/ns/net").open() as before:
        try:
            own_network()
            yield
        finally:
            if libc.setns(before.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


def machine(name: str, number: int, folder: pathlib.Path) -> Namespaces:
    """Start the namespaces of a node and join them to the control plane's network."""
    folder.mkdir(parents=True, exist_ok=True)
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    namespaces = ("--mount", "--net", "--pid", "--uts", "--ipc")
    init = (str(_SELF / "node-init"), name, str(folder))
    unshare = ("unshare", *namespaces, "--fork", "--kill-child", "--", *init)
    spaces = Namespaces(name, unshare, folder / "init.log")
    try:
        waiting.until(lambda: spaces.has_ended or ready.exists(), f"namespaces of {name}")
        inner = f"n{number}"
        # A link goes a moment after the namespace of its other end, as after a power cut.
        waiting.until(lambda: inner not in dict(socket.if_nameindex()).values(), f"{inner} to go")
        for command in (
            f"ip link add {inner} type veth peer name eth0 netns {spaces.pid}",
            f"ip link set {inner} master {_BRIDGE} up",
        ):
            subprocess.run(command.split(), check=True)
        for command in (
            f"ip addr add 10.77.0.{10 + number}/16 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {CONTROL_IP}",
        ):
            spaces.run(*command.split())
    except BaseException:
        spaces.end()
        raise
    return spaces


@contextlib.contextmanager
def cgroup(name: str) -> Iterator[str]:
    """Make a group in every hierarchy; return its path below each."""
    hierarchies = [
        each
        for each in _CONTROLLERS.iterdir()
        if (each / "cgroup.procs").exists() and each.is_dir()
    ]
    # Of version 2 there is one, and the folders in it are groups (cgroups(7), "Cgroups v2").
    if (_CONTROLLERS / "cgroup.controllers").exists():
        hierarchies = [_CONTROLLERS]
    for hierarchy in hierarchies:
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            # The root of version 2 has none, and a group without a value has the root's.
            if (hierarchy / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())
    try:
        yield f"/{name}"
    finally:
        for hierarchy in hierarchies:
            group = hierarchy / name
            waiting.until(functools.partial(_is_removed, group), f"the end of {group}")


def _is_removed(group: pathlib.Path) -> bool:
    """Remove a group with those in it; return whether it is gone.

    A group may be busy for a moment after its last process has ended.
    """
    for path, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            pathlib.Path(path).rmdir()
    return not group.exists()


def missing() -> str:
    """Return what keeps this machine from running a node; empty where nothing does."""
    if os.geteuid() != 0:
        return "only root can make the namespaces of a node"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    done = subprocess.run(["unshare", "--mount", "--net", "true"], check=False)
    return "namespaces cannot be made here" if done.returncode else ""


def of_the_machine() -> frozenset[tuple[str, str]]:
    """Return what no node may change: settings, mounts, network devices, names of files."""
    settings = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    # Images are built with buildah, which has a cache and a folder for networks, and mount(8).
    of_builds = {("/var/lib", "containers"), ("/etc/cni", "net.d"), ("/run", "mount")}
    folders = (
        *("/etc/cni", "/run", "/run/containerd", "/var/lib", "/var/lib/kubelet"),
        *("/var/lib/containerd", "/var/lib/cni", "/dev", "/var/log/pods"),
    )
    mounts = pathlib.Path("/proc/1/mountinfo").read_text().splitlines()
    links = pathlib.Path("/proc/1/net/dev").read_text().splitlines()
    files = {(each, file.name) for each in folders for file in _files(pathlib.Path(each))}
    return frozenset(
        {
            *((name, pathlib.Path("/proc/sys", name).read_text()) for name in settings),
            # Another test process may be building its images.
            *(("mount", line) for line in mounts if IMAGE_CACHE not in line),
            *(("link", line.partition(":")[0].strip()) for line in links if ":" in line),
            *(files - of_builds),
        }
    )


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [*folder.iterdir()] if folder.is_dir() else []
