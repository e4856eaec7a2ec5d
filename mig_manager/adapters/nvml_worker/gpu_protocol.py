"""What goes over the pipe between the agent and its GPU worker.

Pickles of our own frozen values: both ends are the same code at the same version, started one by
the other, and nobody else can write to the pipe, so that pickle's one danger is absent.
"""

import dataclasses
import pickle
from collections.abc import Iterable

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_meter
from mig_manager.core import model, steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Ask for all GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Ask for the steps of a plan to be run."""

    plan: steps.Plan
    seen: tuple[model.Gpu, ...] = ()
    """What lasts of the GPUs of the plan as last observed; their instances are looked at again."""

    @staticmethod
    def of(plan: steps.Plan, seen: Iterable[model.Gpu]) -> "Execute":
        """Ask with what is known of the GPUs concerned, and of no others."""
        concerned = {gpu.gpu_uuid for gpu in plan.gpus}
        known = (gpu for gpu in seen if gpu.uuid in concerned)
        lasting = tuple(dataclasses.replace(gpu, gpu_instances=()) for gpu in known)
        return Execute(plan=plan, seen=lasting)


Request = Observe | Execute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """What all answers tell."""

    calls: tuple[nvml_meter.Calls, ...] = ()
    """What was spent on NVML."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed(_Reply):
    """Answer to ``Observe``."""

    gpus: model.ObservedGpus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executed(_Reply):
    """Answer to ``Execute``: every step is done."""

    gpus: model.ObservedGpus = model.NO_GPUS
    """The GPUs of the plan as they are now."""


_REFUSALS = (errors.GpuInUseError, errors.StalePlanError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_Reply):
    """Answer to either: a ``HardwareError`` in fields, since such exceptions do not pickle."""

    message: str
    reason: errors.Reason
    operation: str
    gpu: str
    code: int | None
    refusal: type[errors.GpuInUseError | errors.StalePlanError] | None = None
    """Why no step was run; None: one may have been."""

    @staticmethod
    def of(error: errors.HardwareError) -> "Failed":
        """Take an error apart."""
        return Failed(
            message=error.message,
            reason=error.reason,
            operation=error.operation,
            gpu=error.gpu,
            code=error.code,
            refusal=type(error) if isinstance(error, _REFUSALS) else None,
        )

    def to_error(self) -> errors.HardwareError:
        """Put the error together again."""
        if self.refusal is not None:
            return self.refusal(self.message)
        return errors.HardwareError(
            self.message,
            reason=self.reason,
            operation=self.operation,
            gpu=self.gpu,
            code=self.code,
        )


Answer = Observed | Executed | Failed


def encode(message: Request | Answer) -> bytes:
    """Turn a message into bytes; their end is the end of the stream."""
    return pickle.dumps(message)


def decode_request(data: bytes) -> Request | None:
    """Read a request; None when the asking side went away before it had asked."""
    if not data:
        return None
    request: Request = pickle.loads(data)  # noqa: S301 - see the module docstring
    return request


def decode_answer(data: bytes) -> Answer | None:
    """Read an answer; None when there is none, or the worker died in the middle of it."""
    try:
        answer: Answer = pickle.loads(data)  # noqa: S301 - see the module docstring
    except Exception:  # noqa: BLE001 - torn bytes can make the unpickler raise anything
        return None
    return answer
