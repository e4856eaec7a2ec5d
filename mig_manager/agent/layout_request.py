"""A requested layout, and how to attempt it."""

import dataclasses

from mig_manager.core.layout import custom_layouts
from mig_manager.core.records import requests, run_status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The requested layout, and how to attempt it."""

    config: str = ""  # the name of the layout; empty: none is requested
    custom: custom_layouts.CustomRequest | None = None
    """The content of ``custom``; None for other layouts."""
    annotation_hash: str = ""
    """Hash of ``custom`` where its content is not needed, because nothing is applied."""
    is_new: bool = False  # whether label or annotation have changed since the last run
    is_heal: bool = False  # whether a drift is healed, for which no pod is evicted
    attempt: int = 1
    retry_after_s: float = 0.0  # the pause before the next attempt, if this one fails
    uuids_to_repair: frozenset[str] = frozenset()
    """Of GPUs, in an attempt that repairs them; empty: the layout is applied."""

    @property
    def key(self) -> run_status.RequestKey:
        """Which request this is, for comparison with a record or journal."""
        custom = self.custom
        return run_status.RequestKey(
            self.config, custom.annotation_hash if custom else self.annotation_hash
        )

    def never_evicts(self, record: requests.RequestRecord) -> bool:
        """Return whether no attempt evicts a pod: for a layout that programs choose on demand.

        A repair has the right from the owner's setting, whatever the origin of the layout.
        """
        return not (record.may_evict or self.uuids_to_repair)
