"""What a boot has not restored, with a remedy."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.records import gpu_recovery

APPLY_ONE = "Apply a layout; once verified, it is restored at the next boot."
_APPLY_AGAIN = "Apply the layout again, or another one; see 'mig-manager status'."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that was not restored."""

    message: str
    remedy: str


def of_other_gpus(
    observed: model.ObservedGpus, target: Mapping[str, model.GpuSnapshot]
) -> Iterator[Problem]:
    """Yield the GPUs that are unreachable, missing or new, if they support MIG."""
    yield from map(_unreachable, observed.unreachable)
    observed_uuids = {
        gpu.uuid for gpu in (*observed, *observed.unreachable_snapshots(tuple(target.values())))
    }
    for gone in target.values():
        if gone.uuid not in observed_uuids and gone.current_mode is not None:
            yield Problem(message=f"GPU {gone.uuid} is gone, with its instances", remedy=APPLY_ONE)
    for gpu in observed:
        if gpu.uuid not in target and gpu.current_mode is not None:
            yield Problem(
                message=f"{gpu} is new, or its MIG mode waited for this boot: no layout is saved "
                "for it, and it was not changed",
                remedy=APPLY_ONE,
            )


def of_lost_gpus(
    lost: Iterable[model.UnreachableGpu], observed: model.ObservedGpus
) -> Iterator[Problem]:
    """Yield the GPUs that were lost during the changes, after all were ``observed``."""
    reported = {_key(gpu) for gpu in observed.unreachable}
    by_key = {_key(gpu): gpu for gpu in lost}
    yield from (_unreachable(gpu) for key, gpu in by_key.items() if key not in reported)


def of_error(error: errors.MigManagerError) -> Problem:
    """Return a failed change, or GPUs that cannot be observed."""
    remedy = error.remedy_at_shell or _APPLY_AGAIN
    return Problem(message=error.message, remedy=str(remedy))


def _key(gpu: model.UnreachableGpu) -> str | int:
    """Identify a GPU whose UUID may be unknown."""
    return gpu.uuid or gpu.index


def _unreachable(gpu: model.UnreachableGpu) -> Problem:
    return Problem(
        message=f"{gpu.sentence}; once it is back, the next boot restores its saved layout",
        remedy=gpu_recovery.remedy(gpu),
    )
