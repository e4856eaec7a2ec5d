"""The stages of the course that ``acceptance --change-gpu`` runs: states and outcomes."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mig_manager.core import model
from mig_manager.core.acceptance import differences, meanings
from mig_manager.core.layout import generator

if TYPE_CHECKING:
    from mig_manager.core.answers import captures

_MAX_LAYOUTS = 4  # full layouts, each in two orders


class StageOutcome(enum.Enum):
    """How a stage ended."""

    DONE = "done"
    FAILED = "failed"
    NOT_TRIED = "not-tried"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceStage:
    """One stage; its texts identify no machine."""

    name: str
    outcome: StageOutcome = StageOutcome.DONE
    why: str = ""  # empty: done

    def to_data(self) -> "captures.CourseStage":
        """Return plain data for the answer."""
        return {"name": self.name, "outcome": self.outcome.value, "why": self.why}


def failures(gpu: int, stages: Iterable[AcceptanceStage]) -> "Iterator[captures.Difference]":
    """Yield a difference for each stage that failed on a GPU."""
    comparison = differences.Comparison(gpu)
    for stage in stages:
        if stage.outcome is StageOutcome.FAILED:
            yield comparison.of(
                meanings.Subject.COURSE, stage.name, StageOutcome.DONE.value, stage.why
            )


def single_profiles(
    profiles: tuple[model.GpuInstanceProfile, ...],
) -> Iterator[tuple[str, model.DesiredGpu]]:
    """Yield each profile at each placement, and one divided into compute instances."""
    on = model.MigMode.ENABLED
    for row in profiles:
        for place in row.placements:
            pin = model.Pin(profile=row.profile, start=place.start)
            yield f"{row.profile} at {place}", model.DesiredGpu.of(on, {}, {pin: 1})
        if row.profile.gpu_slices > 1:
            part = dataclasses.replace(row.profile, compute_slices=1)
            count = row.profile.gpu_slices
            yield f"{count} of {part}", model.DesiredGpu.of(on, {part: count})


def full_layouts(
    profiles: tuple[model.GpuInstanceProfile, ...],
) -> Iterator[tuple[str, model.DesiredGpu]]:
    """Yield some full layouts, in one order and in the reverse."""
    counts = list(itertools.islice(generator.maximal(profiles), _MAX_LAYOUTS))
    for order, each in (("", counts), (" in reverse order", counts[::-1])):
        for devices in each:
            name = ", ".join(f"{count} {profile}" for profile, count in dict(devices).items())
            yield f"full: {name}{order}", model.DesiredGpu.of(model.MigMode.ENABLED, dict(devices))


def disjoint_pair(
    profiles: tuple[model.GpuInstanceProfile, ...],
) -> tuple[model.Pin, model.Pin] | None:
    """Return two instances that exist beside each other; None if no profile fits twice."""
    for row in profiles:
        if row.max_instances > 1 and len(row.placements) > 1:
            one, *_, other = row.placements
            if not one.overlaps(other):
                return (
                    model.Pin(profile=row.profile, start=one.start),
                    model.Pin(profile=row.profile, start=other.start),
                )
    return None
