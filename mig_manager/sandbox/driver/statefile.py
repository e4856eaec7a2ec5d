"""The state of a simulated node: one JSON file that all its processes share.

Readers take no lock: the file is replaced, never written in place, and a counter in shared memory
tells them when. Writers exclude each other with ``flock``, which holds between threads too because
each writer opens the lock file anew, and which the kernel gives back when a process is killed.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import mmap
import os
import pathlib
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mig_manager import errors
from mig_manager.sandbox.driver import identities, states, transitions

T = TypeVar("T")
_FIRST_PID = 4001

_Version = tuple[int, int, int]
_COUNTER = struct.Struct("=Q")
_GOOD_S = 0.001
"""How long a state that was read is good without another look at its file, if nobody has counted
a write: a writer that is killed may have written and not counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """The state as it was last read or written."""

    version: _Version
    node: states.NodeState
    writes: int
    good_until_s: float


class SharedState:
    """The state file, its locks, and what the sandbox does beside NVML: clients, faults, boots.

    Safe for use by any number of threads and processes.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._cached: _Cached | None = None
        self._writes: mmap.mmap | None = None

    def close(self) -> None:
        """Give back what reading has opened; the next reading opens it again."""
        writes, self._writes = self._writes, None
        if writes is not None:
            writes.close()

    def create(self, spec: str, options: states.Options) -> None:
        """Write the state of a freshly booted node, unless the file exists.

        Raises:
            UsageError: The spec is no node, or the file holds a node with another spec.
        """
        boards = identities.boards(spec, options)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._exclusively("lock"):
            if self.path.exists():
                self._require_same(spec)
                return
            self._write(
                states.NodeState(
                    spec=spec,
                    options=options,
                    gpus=tuple(states.GpuState() for _ in boards),
                    faults=tuple(states.ArmedFault(fault=f) for f in options.faults),
                )
            )

    def read(self) -> states.NodeState:
        """Return the state now.

        Raises:
            FileNotFoundError: The node was never created, or its file was removed, which may show
                with the delay of a moment.
        """
        cached = self._cached
        # System calls give the interpreter to other threads, so that most queries do without.
        if (
            cached is not None
            and cached.writes == self._count_writes()
            and time.monotonic() < cached.good_until_s
        ):
            return cached.node
        return self.read_anew()

    def read_anew(self) -> states.NodeState:
        """Return the state now, whatever was read before.

        Raises:
            FileNotFoundError: The node was never created, or its file was removed.
        """
        writes = self._count_writes()
        version = self._version()
        cached = self._cached
        if cached is not None and cached.version == version:
            node = cached.node
        else:
            with self.path.open(encoding="utf-8") as file:
                version = _version(os.fstat(file.fileno()))
                node = states.decode(json.load(file))
        self._keep(version, node, writes)
        return node

    def _keep(self, version: _Version, node: states.NodeState, writes: int) -> None:
        self._cached = _Cached(
            version=version,
            node=node,
            writes=writes,
            good_until_s=time.monotonic() + _GOOD_S,
        )

    def _count_writes(self) -> int:
        """Return how often the file was written, as far as the writers lived to count it."""
        (count,) = _COUNTER.unpack_from(self._counter())
        return int(count)

    def _counter(self) -> mmap.mmap:
        if self._writes is None:
            # Nothing is to be left beside a node that does not exist.
            self.path.stat()
            with self.beside("writes").open("a+b") as file:
                if os.fstat(file.fileno()).st_size < _COUNTER.size:
                    os.ftruncate(file.fileno(), _COUNTER.size)
                self._writes = mmap.mmap(file.fileno(), _COUNTER.size)
        return self._writes

    def update(self, change: Callable[[states.NodeState], tuple[states.NodeState, T]]) -> T:
        """Replace the state by what ``change`` makes of it, and return the other thing it gives.

        ``change`` runs under the lock; when it raises, or returns the same state, nothing is
        written.
        """
        with self._exclusively("lock"):
            before = self.read_anew()
            after, result = change(before)
            if after is not before:
                self._write(after)
            return result

    @contextlib.contextmanager
    def gpu_lock(self, index: int) -> Iterator[None]:
        """Hold one GPU as the driver does during a change, against all threads and processes."""
        name = "gpu-all" if self.read().options.serialise_all_gpus else f"gpu{index}"
        with self._exclusively(f"{name}.lock"):
            yield

    @property
    def boards(self) -> tuple[identities.Board, ...]:
        """What never changes of the GPUs, ascending by index."""
        return boards_of(self.read())

    @property
    def boot_id(self) -> str:
        """Another UUID after each reboot, as ``/proc/sys/kernel/random/boot_id`` has."""
        node = self.read()
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{node.options.seed}/{node.spec}/{node.boots}"))

    def add_client(
        self,
        device_uuid: str,
        *,
        name: str,
        kind: states.ClientKind = states.ClientKind.COMPUTE,
        pid: int | None = None,
    ) -> states.Client:
        """Let a process hold a whole GPU or the instance behind a MIG device.

        Args:
            device_uuid: UUID of a GPU or of a MIG device, as PodResources gives it.
            name: Process name.
            kind: What it does there.
            pid: Process id; None makes one up.

        Raises:
            LookupError: No such device.
        """

        def change(
            node: states.NodeState,
        ) -> tuple[states.NodeState, states.Client]:
            gpu_uuid, instance_id, compute_id = self.locate(device_uuid, node)
            client = states.Client(
                client_id=node.next_serial,
                pid=_FIRST_PID + node.next_serial if pid is None else pid,
                name=name,
                kind=kind,
                gpu_uuid=gpu_uuid,
                gpu_instance_id=instance_id,
                compute_instance_id=compute_id,
            )
            after = dataclasses.replace(
                node, clients=(*node.clients, client), next_serial=node.next_serial + 1
            )
            return after, client

        return self.update(change)

    def remove_client(self, client: states.Client) -> None:
        """Let go what a client held; done when it has already."""

        def change(node: states.NodeState) -> tuple[states.NodeState, None]:
            kept = tuple(c for c in node.clients if c.client_id != client.client_id)
            return dataclasses.replace(node, clients=kept), None

        self.update(change)

    def clients(self) -> tuple[states.Client, ...]:
        """Return all clients, oldest first."""
        return self.read().clients

    def locate(
        self, device_uuid: str, node: states.NodeState | None = None
    ) -> tuple[str, int | None, int | None]:
        """Return GPU UUID, GPU-instance id and compute-instance id of a device.

        Raises:
            LookupError: No such device.
        """
        state = self.read() if node is None else node
        for board, gpu in zip(self.boards, state.gpus, strict=True):
            if board.uuid == device_uuid:
                return board.uuid, None, None
            for instance in gpu.instances:
                for compute in instance.compute_instances:
                    if board.mig_uuid(instance, compute) == device_uuid:
                        return board.uuid, instance.instance_id, compute.instance_id
        raise LookupError(f"the simulated node has no device {device_uuid}")

    def add_fault(self, fault: states.Fault) -> None:
        """Arm a fault; its calls count from now."""

        def change(node: states.NodeState) -> tuple[states.NodeState, None]:
            armed = (*node.faults, states.ArmedFault(fault=fault))
            return dataclasses.replace(node, faults=armed), None

        self.update(change)

    def strike(self, function: str, gpu: int | None) -> tuple[states.Fault, ...]:
        """Count a call against the armed faults and return those that strike it."""
        if not any(armed.matches(function, gpu) for armed in self.read().faults):
            return ()

        def change(
            node: states.NodeState,
        ) -> tuple[states.NodeState, tuple[states.Fault, ...]]:
            counted = tuple(armed.counted(function, gpu) for armed in node.faults)
            struck = tuple(
                new.fault
                for old, new in zip(node.faults, counted, strict=True)
                if new.fired > old.fired
            )
            return dataclasses.replace(node, faults=counted), struck

        return self.update(change)

    def clear_faults(self) -> None:
        """Disarm all faults and forget their counters."""
        self.update(lambda node: (dataclasses.replace(node, faults=()), None))

    def faults(self) -> tuple[states.ArmedFault, ...]:
        """Return the armed faults with their counters, oldest first."""
        return self.read().faults

    def set_options(self, options: states.Options) -> None:
        """Turn the knobs of a running node; faults are armed by ``add_fault`` instead."""
        self.update(lambda node: (dataclasses.replace(node, options=options), None))

    def reset_gpu(self, index: int) -> states.Code:
        """Reset one GPU as ``nvidia-smi --gpu-reset`` does.

        Returns:
            SUCCESS, or why not, such as IN_USE; then nothing has changed.
        """
        return self.reset_gpus([index]).code

    def reset_gpus(self, indices: Sequence[int]) -> transitions.Answer:
        """Reset GPUs as ``nvidia-smi --gpu-reset`` does in one command."""
        with contextlib.ExitStack() as stack:
            # Under one lock for all, there is nothing more to be held.
            alone = self.read().options.serialise_all_gpus
            for index in sorted(set(indices))[: 1 if alone else None]:
                stack.enter_context(self.gpu_lock(index))
            return self.update(lambda node: transitions.attempt(node, self.boards, indices))

    def lose_gpu(self, index: int) -> None:
        """Let a GPU fall off the bus, with all that is on it."""

        def change(node: states.NodeState) -> tuple[states.NodeState, None]:
            lost = dataclasses.replace(node.gpus[index], is_lost=True)
            return node.with_gpu(index, lost), None

        self.update(change)

    def return_gpu(self, index: int, *, keeps_mode: bool = True) -> None:
        """Let a lost GPU come back, reset: without instances.

        Args:
            index: NVML index.
            keeps_mode: Whether an Ampere GPU still has its MIG mode; newer ones never do.
        """

        def change(node: states.NodeState) -> tuple[states.NodeState, None]:
            back = transitions.reboot(self.boards[index], node.gpus[index])
            if not keeps_mode:
                back = dataclasses.replace(back, is_enabled=False, is_pending=False)
            return node.with_gpu(index, dataclasses.replace(back, is_lost=False)), None

        self.update(change)

    def reboot(self) -> None:
        """Reboot the node: no clients, no instances, and MIG mode where it persists."""

        def change(node: states.NodeState) -> tuple[states.NodeState, None]:
            gpus = tuple(
                dataclasses.replace(transitions.reboot(board, gpu), is_lost=False)
                for board, gpu in zip(self.boards, node.gpus, strict=True)
            )
            after = dataclasses.replace(node, gpus=gpus, clients=(), boots=node.boots + 1)
            return after, None

        self.update(change)

    def beside(self, suffix: str) -> pathlib.Path:
        """Return the path of a file that belongs to this state."""
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def _require_same(self, spec: str) -> None:
        existing = self.read().spec
        if existing != spec:
            raise errors.UsageError(
                f"{self.path} holds the simulated node {existing!r}, not {spec!r}; remove the file"
            )

    def _version(self) -> _Version:
        return _version(self.path.stat())

    def _write(self, node: states.NodeState) -> None:
        """Replace the file; its time stamp always grows, since readers tell versions by it."""
        fresh = self.beside("new")
        fresh.write_text(json.dumps(states.encode(node)), encoding="utf-8")
        last = self.path.stat().st_mtime_ns if self.path.exists() else 0
        stamp = max(time.time_ns(), last + 1)
        os.utime(fresh, ns=(stamp, stamp))
        version = _version(fresh.stat())
        fresh.replace(self.path)
        writes = self._count_writes() + 1
        _COUNTER.pack_into(self._counter(), 0, writes)
        self._keep(version, node, writes)

    @contextlib.contextmanager
    def _exclusively(self, suffix: str) -> Iterator[None]:
        with self.beside(suffix).open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def boards_of(node: states.NodeState) -> tuple[identities.Board, ...]:
    """Return what never changes of a node's GPUs, ascending by index."""
    return _boards(node.spec, node.options.seed, node.options.swapped_gpus)


def _version(stat: os.stat_result) -> _Version:
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


@functools.lru_cache(maxsize=8)
def _boards(spec: str, seed: str, swapped_gpus: tuple[int, ...]) -> tuple[identities.Board, ...]:
    return identities.boards(spec, states.Options(seed=seed, swapped_gpus=swapped_gpus))
