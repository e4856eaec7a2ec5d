"""The status of a run, for people and other programs, as JSON on the node.

The agent writes a ``RunStatus``; ``parse`` is its only reader.
"""

import collections
import dataclasses
import datetime as dt
import enum
import json
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from mig_manager import reasons
from mig_manager.core import messages, model, timestamps
from mig_manager.core.files import json_text
from mig_manager.core.objects import node_object, well_known

STATUS_VERSION = 1

_MAX_ORIGIN = 2000
_MAX_GPUS = 64


class State(enum.Enum):
    """Value of ``nvidia.com/mig.config.state``; the four values of NVIDIA's mig-manager."""

    PENDING = "pending"
    REBOOTING = "rebooting"
    SUCCESS = "success"
    FAILED = "failed"


UNDER_WAY = (State.PENDING.value, State.REBOOTING.value)
"""Values of that label while an agent works on a request."""


class Phase(enum.Enum):
    """Phase of a run; published in the status annotation, in logs and as Events."""

    RESOLVE = "Resolve"
    WAIT = "Wait"
    TAINT = "Taint"
    DRAIN = "Drain"
    PAUSE = "Pause"
    EXECUTE = "Execute"
    ROLL_BACK = "RollBack"
    REBOOT = "Reboot"
    RESUME = "Resume"
    VERIFY = "Verify"
    DONE = "Done"


class RequestKey(NamedTuple):
    """Which request a run, record or journal is for: equal for the same content."""

    layout: str  # the name of the layout; empty: none is requested
    annotation_hash: str  # hash of the annotation with the layout; empty: from another source


NO_REQUEST = RequestKey("", "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run, as the status annotation shows it."""

    layout: str
    content_hash: str  # hash of the layout's meaning; empty until the layout is resolved
    origin: str = ""  # the layout's place in a file, or for which GPUs it was generated
    is_from_owner: bool = False  # whether the owner wrote the layout; not published
    state: State
    phase: Phase
    reason: reasons.Reason | None
    message: str
    attempt: int
    started_at: str
    finished_at: str | None
    retry_at: str | None = None
    """When the agent retries the same request; None: only after a change."""
    is_rebooted: bool = False
    """Whether the machine was rebooted for this request, which it is at most once."""
    annotation_hash: str = ""
    """Hash of the annotation with the layout; empty if the layout is from another source."""
    observed_gpus: model.ObservedGpus | None = None
    """As last observed; empty if that failed, None if it was not tried."""
    file_problem: str = ""  # why the file cannot be used for this layout, which is still active
    absent_uuids: tuple[str, ...] = ()
    """GPUs that the node's own layout names and the node lacks; only the message shows them."""

    @property
    def gpus(self) -> model.ObservedGpus:
        """The GPUs as last observed; empty if none are known."""
        return model.NO_GPUS if self.observed_gpus is None else self.observed_gpus

    @property
    def title(self) -> str:
        """The layout's name, with its hash if many layouts share the name."""
        return _title(self)

    def in_phase(self, phase: Phase, message: str) -> "RunStatus":
        """Return the status in a new phase."""
        is_reboot = phase is Phase.REBOOT
        return dataclasses.replace(
            self,
            state=State.REBOOTING if is_reboot else State.PENDING,
            phase=phase,
            message=message,
            reason=reasons.Reason.SLOTS_TAKEN if phase is Phase.WAIT else None,
        )

    def to_json(self) -> str:
        """Return the annotation's value: one line, stable keys, no null members."""
        data = {
            "version": STATUS_VERSION,
            "config": self.layout,
            "configHash": self.content_hash,
            "annotationHash": self.annotation_hash,
            "origin": self.origin,
            "state": self.state.value,
            "phase": self.phase.value,
            "reason": self.reason.value if self.reason else None,
            "message": self.message,
            "attempt": self.attempt,
            "startedAt": self.started_at,
            "finishedAt": self.finished_at,
            "retryAt": self.retry_at,
            "rebooted": self.is_rebooted or None,
            "configProblem": self.file_problem,
            "gpus": [
                {
                    "index": gpu.index,
                    "uuid": gpu.uuid,
                    "mig": gpu.current_mode.value if gpu.current_mode else "unsupported",
                    "devices": device_counts(gpu),
                }
                for gpu in self.gpus
            ]
            or None,
            "unreachableGpus": [
                {
                    "index": gpu.index,
                    "uuid": gpu.uuid,
                    "pci": gpu.pci_address,
                    "reason": gpu.reason.value,
                    "message": gpu.message,
                }
                for gpu in self.gpus.unreachable
            ]
            or None,
        }
        return json.dumps({key: value for key, value in data.items() if value not in (None, "")})


class Fields(TypedDict, total=False):
    """New values of a status; fields that it lacks stay."""

    content_hash: str
    origin: str
    is_from_owner: bool
    is_rebooted: bool
    observed_gpus: model.ObservedGpus
    file_problem: str
    absent_uuids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStatus:
    """A parsed status annotation; untrusted, because any client may have written it."""

    layout: str
    content_hash: str
    state: State
    phase: str
    reason: str
    message: str
    attempt: int
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    retry_at: dt.datetime | None
    is_retried: bool  # whether the agent retries without a change
    is_rebooted: bool
    unreachable: tuple[str, ...]  # unreachable GPUs, in words
    origin: str = ""  # origin of the layout
    annotation_hash: str = ""  # hash of the annotation with the layout; empty for other layouts

    @property
    def title(self) -> str:
        """As ``RunStatus.title``."""
        return _title(self)

    @property
    def key(self) -> RequestKey:
        """Which request the run is for."""
        return RequestKey(self.layout, self.annotation_hash)

    @property
    def at(self) -> dt.datetime | None:
        """When the run finished; when it started, if it has not finished."""
        return self.finished_at or self.started_at


def _title(status: RunStatus | PublishedStatus) -> str:
    is_shared = status.annotation_hash and status.content_hash
    return f"{status.layout} ({status.content_hash})" if is_shared else status.layout


def parse(text: str) -> PublishedStatus:
    """Parse a status annotation, with its texts made safe to print; ValueError if invalid."""
    data = json_text.parse_object(text)
    attempt = data.get("attempt", 1)
    return PublishedStatus(
        layout=_word(data, "config"),
        content_hash=_word(data, "configHash"),
        state=State(data.get("state")),
        phase=_word(data, "phase"),
        reason=_word(data, "reason"),
        message=messages.fit(
            messages.printable(json_text.string(data, "message", ""), " "), messages.MAX_BYTES
        ),
        # To Python, true is a number.
        attempt=attempt if type(attempt) is int and 0 <= attempt < 2**31 else 1,
        started_at=timestamps.parse(data.get("startedAt")),
        finished_at=timestamps.parse(data.get("finishedAt")),
        retry_at=timestamps.parse(data.get("retryAt")),
        is_retried="retryAt" in data,
        is_rebooted=data.get("rebooted") is True,
        unreachable=_unreachable(data.get("unreachableGpus")),
        origin=messages.word(json_text.string(data, "origin", ""), _MAX_ORIGIN),
        annotation_hash=_word(data, "annotationHash"),
    )


def _word(data: Mapping[str, object], key: str) -> str:
    return messages.word(json_text.string(data, key, ""))


def published_on(view: node_object.NodeView) -> PublishedStatus | None:
    """Return the status that a Node shows; None if it is missing or invalid."""
    try:
        return parse(view.annotations.get(well_known.STATUS_ANNOTATION, ""))
    except ValueError:
        return None


_REASONS_AFTER_SUCCESS = frozenset(
    {reasons.Reason.DRIFTED.value, reasons.Reason.PHANTOM_DEVICES.value}
)


def was_active(published: PublishedStatus | None) -> bool:
    """Return whether the status's layout was active, or drifted, or came with phantom devices."""
    return (
        published is not None
        and bool(published.layout)
        and (published.state is State.SUCCESS or published.reason in _REASONS_AFTER_SUCCESS)
    )


def _unreachable(rows: object) -> tuple[str, ...]:
    return tuple(
        f"GPU {index}" + (f" ({uuid})" if (uuid := _word(row, "uuid")) else "")
        for row in (rows[:_MAX_GPUS] if isinstance(rows, list) else ())
        if isinstance(row, dict) and isinstance(index := row.get("index"), int)
    )


def device_counts(gpu: model.Gpu) -> dict[str, int]:
    """Return how many compute instances of each profile a GPU has, biggest first."""
    inside = (device.profile for device in gpu.devices)
    return collections.Counter(map(str, sorted(inside)))
