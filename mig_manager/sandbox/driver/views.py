"""The simulated node as a C function sees it."""

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

from mig_manager.catalogue import product_table
from mig_manager.sandbox.driver import arguments, sessions, states, transitions


@dataclasses.dataclass(slots=True, kw_only=True)
class DriverView:
    """The node as a function sees it; made in every call, where a frozen class is slow."""

    session: sessions.Session
    node: states.MachineState
    boards: tuple[states.Board, ...]
    read: Callable[[], states.MachineState]  # reads the node again, for long calls

    def put_handle(self, reference: Any, target: sessions.HandleTarget) -> None:
        """Write a handle for the caller."""
        arguments.put(reference, ctypes.c_void_p, self.session.handle(target))


@dataclasses.dataclass(slots=True, kw_only=True)
class DeviceView(DriverView):
    """A view of the device or instance behind the first argument."""

    target: sessions.HandleTarget

    @property
    def board(self) -> states.Board:
        """The constant properties of its GPU."""
        return self.boards[self.target.gpu]

    @property
    def gpu(self) -> states.GpuState:
        """The state of its GPU."""
        return self.node.gpus[self.target.gpu]

    @property
    def now(self) -> transitions.Situation:
        """The situation of its GPU."""
        return transitions.Situation(
            board=self.board,
            gpu=self.gpu,
            clients=self.node.clients_of(self.board.uuid),
            options=self.node.options,
            serial=self.node.next_serial,
        )

    @property
    def is_gpu(self) -> bool:
        """Whether it is a whole GPU."""
        return self.target.kind is sessions.HandleKind.GPU

    @property
    def instance(self) -> states.GpuInstance:
        """Its GPU instance; Refused (INVALID_ARGUMENT) if it was destroyed."""
        for instance in self.gpu.instances:
            if instance.serial == self.target.instance:
                return instance
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    @property
    def compute(self) -> states.ComputeInstance:
        """Its compute instance; Refused (INVALID_ARGUMENT) if it was destroyed."""
        for compute in self.instance.compute_instances:
            if compute.serial == self.target.compute:
                return compute
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    @property
    def parent(self) -> product_table.GpuProfile:
        """The profile of its GPU instance."""
        return self.board.row(self.instance.profile_id)

    @property
    def whole(self) -> sessions.HandleTarget:
        """Its GPU as a target."""
        return sessions.whole(self.node, self.target.gpu)

    def target_of(self, instance: states.GpuInstance) -> sessions.HandleTarget:
        """Return the target of a GPU instance of this GPU."""
        return sessions.HandleTarget(
            kind=sessions.HandleKind.GPU_INSTANCE, gpu=self.target.gpu, instance=instance.serial
        )

    def target_within(self, compute: states.ComputeInstance) -> sessions.HandleTarget:
        """Return the target of a compute instance of this GPU instance."""
        return dataclasses.replace(
            self.target_of(self.instance),
            kind=sessions.HandleKind.COMPUTE_INSTANCE,
            compute=compute.serial,
        )

    def check(self) -> None:
        """Raise ``Refused`` for the handle of a lost GPU or of a destroyed instance."""
        if self.gpu.is_lost:
            raise states.Refused(states.Code.GPU_IS_LOST)
        match self.target.kind:
            case sessions.HandleKind.GPU:
                if self.target != self.whole:
                    raise states.Refused(states.Code.INVALID_ARGUMENT)
            case sessions.HandleKind.GPU_INSTANCE:
                _ = self.instance
            case sessions.HandleKind.MIG_DEVICE | sessions.HandleKind.COMPUTE_INSTANCE:
                _ = self.compute
