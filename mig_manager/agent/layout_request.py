"""A requested layout, and how to attempt it."""

import dataclasses

from mig_manager.core.layout import custom_layouts
from mig_manager.core.records import run_status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The requested layout."""

    layout: str = ""  # the name of the layout; empty: none is requested
    custom: custom_layouts.CustomRequest | None = None
    """The content of ``custom``; None for other layouts."""
    annotation_hash: str = ""
    """Hash of ``custom`` where its content is not needed, because nothing is applied."""

    @property
    def key(self) -> run_status.RequestKey:
        """Which request this is, for comparison with a record or journal."""
        custom = self.custom
        return run_status.RequestKey(
            self.layout, custom.annotation_hash if custom else self.annotation_hash
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOptions:
    """How to attempt a request."""

    attempt: int = 1  # the number of the attempt
    is_new: bool = False  # whether label or annotation have changed since the last run
    is_heal: bool = False  # whether a drift is healed
    retry_after_s: float = 0.0  # the pause before the next attempt, if this one fails
    uuids_to_repair: frozenset[str] = frozenset()
    """Of the GPUs that the attempt resets; see ``is_repair``."""

    @property
    def is_repair(self) -> bool:
        """Whether the attempt resets GPUs; if not, it applies the layout."""
        return bool(self.uuids_to_repair)


DEFAULT_OPTIONS = AttemptOptions()
