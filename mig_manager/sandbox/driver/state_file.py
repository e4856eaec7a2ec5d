"""The state of a simulated node: one JSON file that all its processes share.

Readers take no lock: the file is replaced, never written in place, and its time stamp grows with
every write. Writers exclude each other with ``flock``. It works between threads too, because every
writer opens the lock file itself, and the kernel releases it when a process dies.
"""

import contextlib
import dataclasses
import enum
import fcntl
import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.sandbox.driver import states, transitions

_FIRST_PID = 4001

Version = tuple[int, int, int]


class SharedState:
    """The state file, its locks, and changes of the node beside NVML's: clients, resets, boots.

    Safe for use by any number of threads and processes.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._cached: tuple[Version, states.MachineState] | None = None
        """The last state read or written."""

    def create(self, spec: str, options: states.Options | None = None) -> None:
        """Write the state of a freshly booted node such as ``4xH100+2xA30``.

        If the file exists, its node keeps its state and options. Lock files appear beside it.

        Raises:
            UsageError: The spec is malformed, or the file holds a node with other GPUs.
        """
        node = states.first_boot(spec, options or states.Options())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._exclusively("lock"):
            if not self.path.exists():
                self._write(node)
            elif hardware.parse_node(existing := self.read().spec) != hardware.parse_node(spec):
                raise errors.UsageError(
                    f"{self.path} holds the simulated node {_shown(existing)}, not "
                    f"{_shown(spec)}; remove the file"
                )

    def read(self) -> states.MachineState:
        """Return the present state.

        Raises:
            FileNotFoundError: The file is missing; ValueError: it holds no simulated node.
        """
        # Another thread may replace what is cached at any time, by an older state too.
        cached = self._cached
        if cached is None or cached[0] != version_of(self.path.stat()):
            with json_text.decoding("a simulated node"), self.path.open(encoding="utf-8") as file:
                version = version_of(os.fstat(file.fileno()))
                self._cached = cached = version, _decode(json.load(file))
        return _living(cached[1])

    def update(
        self, change: Callable[[states.MachineState], states.MachineState]
    ) -> states.MachineState:
        """Replace the state by the one that ``change`` returns, and return it.

        ``change`` runs under the lock. If it raises, or returns the same state, nothing is
        written.
        """
        with self._exclusively("lock"):
            before = self.read()
            after = change(before)
            if after is not before:
                self._write(after)
            return after

    def gpu_lock(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Lock one GPU as the driver does during a change, against all threads and processes."""
        name = "gpu-all" if self.read().options.serialise_all_gpus else f"gpu{index}"
        return self._exclusively(f"{name}.lock")

    @property
    def boards(self) -> tuple[states.Board, ...]:
        """The constant properties of the GPUs, ascending by index."""
        return states.boards_of(self.read())

    @property
    def products(self) -> tuple[str, ...]:
        """The product names of the GPUs, ascending by index."""
        return tuple(each.product.name for each in self.boards)

    @property
    def boot_id(self) -> str:
        """A new UUID after every reboot, as in ``/proc/sys/kernel/random/boot_id``."""
        node = self.read()
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{node.options.seed}/{node.spec}/{node.boots}"))

    def add_client(
        self,
        device_uuid: str,
        *,
        name: str,
        kind: states.ClientKind = states.ClientKind.COMPUTE,
        pid: int | None = None,
        is_process: bool = False,
    ) -> states.Client:
        """Add a process that uses a whole GPU or the instance behind a MIG device.

        Raises:
            LookupError: No such device.
        """

        def add(node: states.MachineState) -> states.MachineState:
            device = transitions.find_device(node, device_uuid)
            if device is None:
                raise LookupError(f"the simulated node has no device {device_uuid}")
            board, instance, compute = device
            client = states.Client(
                client_id=node.next_serial,
                pid=_FIRST_PID + node.next_serial if pid is None else pid,
                name=name,
                kind=kind,
                gpu_uuid=board.uuid,
                gpu_instance_id=instance.instance_id if instance else None,
                compute_instance_id=compute.instance_id if compute else None,
                is_process=is_process,
            )
            clients = (*node.clients, client)
            serial = node.next_serial + 1
            return dataclasses.replace(node, clients=clients, next_serial=serial)

        return self.update(add).clients[-1]

    def remove_client(self, client: states.Client) -> None:
        """Remove a client, if it exists."""
        self.update(
            lambda node: dataclasses.replace(
                node, clients=tuple(c for c in node.clients if c.client_id != client.client_id)
            )
        )

    def set_latency(self, latency: states.Latency) -> None:
        """Let the driver's calls take these durations from now on."""

        def change(node: states.MachineState) -> states.MachineState:
            options = dataclasses.replace(node.options, latency=latency)
            return dataclasses.replace(node, options=options)

        self.update(change)

    def lose_gpu(self, index: int) -> None:
        """Let a GPU fall off the bus, with its instances."""
        self.update(
            lambda node: node.with_gpu(index, dataclasses.replace(node.gpus[index], is_lost=True))
        )

    def fail_gpu(self, index: int, *, action: int = 0, xid: int | None = None) -> None:
        """Let the driver report a recovery action of a GPU, and an Xid."""

        def fail(node: states.MachineState) -> states.MachineState:
            gpu = node.gpus[index]
            xids = gpu.xids if xid is None else (*gpu.xids, xid)
            # No change of MIG, which ``with_gpu`` would count.
            failed = dataclasses.replace(gpu, recovery_action=action, xids=xids)
            gpus = (*node.gpus[:index], failed, *node.gpus[index + 1 :])
            return dataclasses.replace(node, gpus=gpus)

        self.update(fail)

    def reset_gpus(self, indices: Sequence[int]) -> transitions.ResetResult:
        """Reset GPUs as ``nvidia-smi --gpu-reset`` does in one command."""
        result = transitions.ResetResult()

        def reset(node: states.MachineState) -> states.MachineState:
            nonlocal result
            after, result = transitions.reset_gpus(node, indices)
            return after

        with contextlib.ExitStack() as stack:
            # With one lock for all GPUs, the first is enough.
            is_shared = self.read().options.serialise_all_gpus
            for index in sorted(set(indices))[: 1 if is_shared else None]:
                stack.enter_context(self.gpu_lock(index))
            self.update(reset)
        return result

    def reboot(self) -> None:
        """Reboot the node, which drops clients and instances, and MIG mode unless it persists."""

        def boot(node: states.MachineState) -> states.MachineState:
            gpus = tuple(
                dataclasses.replace(
                    transitions.reboot(board, gpu), is_lost=False, recovery_action=0, xids=()
                )
                for board, gpu in zip(self.boards, node.gpus, strict=True)
            )
            return dataclasses.replace(node, gpus=gpus, clients=(), boots=node.boots + 1)

        self.update(boot)

    def beside(self, suffix: str) -> pathlib.Path:
        """Return the path of a file beside the state file."""
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def _write(self, node: states.MachineState) -> None:
        try:
            self._cached = replace(self.path, node), node
        except OSError as error:
            raise NotSavedError(self.path, error) from error

    @contextlib.contextmanager
    def _exclusively(self, suffix: str) -> Iterator[None]:
        with self.beside(suffix).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class NotSavedError(errors.UsageError, OSError):
    """A state file that cannot be written, as on a full disk."""

    def __init__(self, path: pathlib.Path, cause: OSError) -> None:
        super().__init__(
            f"cannot save simulated GPUs in {path}: {cause.strerror or cause}",
            remedy="Name another file with --simulate-state.",
        )
        self.strerror = cause.strerror


def replace(path: pathlib.Path, data: Any) -> Version:
    """Replace a JSON file, whose time stamp always grows, because it tells versions apart."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(data, default=_plain), encoding="utf-8")
    last = path.stat().st_mtime_ns if path.exists() else 0
    stamp = max(time.time_ns(), last + 1)
    os.utime(fresh, ns=(stamp, stamp))
    version = version_of(fresh.stat())
    fresh.replace(path)
    return version


def _living(node: states.MachineState) -> states.MachineState:
    """Return the node without clients whose process has ended."""
    if not any(client.is_process for client in node.clients):
        return node
    kept = tuple(each for each in node.clients if not each.is_process or _is_running(each.pid))
    return dataclasses.replace(node, clients=kept)


def _is_running(pid: int) -> bool:
    # The file is empty once a process has ended, and gone once it is reaped (``proc(5)``).
    try:
        return bool(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _shown(spec: str) -> str:
    return "of another capture" if spec.startswith("[") else repr(spec)


def version_of(stat: os.stat_result) -> Version:
    """Return the version of a file that ``replace`` wrote."""
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _plain(value: Any) -> Any:
    """Return an enum or a frozen value as ``json.dumps`` takes it."""
    if isinstance(value, enum.Enum):
        return value.value
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _decode(raw: dict[str, Any]) -> states.MachineState:
    """Return the node that ``replace`` wrote."""
    for text in (raw["spec"], raw["options"]["seed"]):
        if not isinstance(text, str):
            raise TypeError(text)
    options = raw["options"] | {
        "latency": states.Latency(**raw["options"]["latency"]),
        "swapped_gpus": tuple(map(int, raw["options"]["swapped_gpus"])),
        "linked_gpus": tuple(tuple(each) for each in raw["options"]["linked_gpus"]),
        "virtualization": model.Virtualization(raw["options"]["virtualization"]),
        "mig_events": states.MigEvents(raw["options"]["mig_events"]),
        "absent_functions": tuple(raw["options"]["absent_functions"]),
    }
    gpus = []
    for gpu in raw["gpus"]:
        instances = []
        for instance in gpu["instances"]:
            computes = tuple(
                states.ComputeInstance(**each | {"placement": model.Placement(*each["placement"])})
                for each in instance["compute_instances"]
            )
            placement = model.Placement(*instance["placement"])
            values = instance | {"placement": placement, "compute_instances": computes}
            instances.append(states.GpuInstance(**values))
        parsed = {"instances": tuple(instances), "xids": tuple(gpu.get("xids", ()))}
        gpus.append(states.GpuState(**gpu | parsed))
    clients = tuple(
        states.Client(**each | {"kind": states.ClientKind(each["kind"])})
        for each in raw["clients"]
    )
    values = {"options": states.Options(**options), "gpus": tuple(gpus), "clients": clients}
    return states.MachineState(**raw | values)
