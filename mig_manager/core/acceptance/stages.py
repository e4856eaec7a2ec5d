"""The stages of the course that ``acceptance --change-gpu`` plays on a GPU."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mig_manager.core.acceptance import differences, meanings

if TYPE_CHECKING:
    from mig_manager.core import answers


class Outcome(enum.Enum):
    """How a stage ended."""

    DONE = "done"
    FAILED = "failed"
    NOT_TRIED = "not-tried"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage; its texts identify no machine."""

    name: str
    outcome: Outcome = Outcome.DONE
    why: str = ""  # empty: done

    def to_data(self) -> "answers.CourseStage":
        """Return plain data for the answer."""
        return {"name": self.name, "outcome": self.outcome.value, "why": self.why}


def failed(gpu: int, stages: Iterable[Stage]) -> Iterator[differences.Difference]:
    """Yield a difference for each stage that failed on a GPU."""
    effect, consequence = meanings.USUAL[meanings.Subject.COURSE]
    for stage in stages:
        if stage.outcome is Outcome.FAILED:
            yield differences.Difference(
                gpu=gpu,
                subject=meanings.Subject.COURSE,
                what=stage.name,
                expected=Outcome.DONE.value,
                actual=stage.why,
                effect=effect,
                consequence=consequence,
            )
