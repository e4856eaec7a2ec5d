"""What the GPU listener tells the agent: one JSON object a line.

The listener keeps running, so lines tell where one message ends.
"""

import dataclasses
import json

from mig_manager import errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """The listener is ready: every change from now on is told."""

    gpus: int
    """How many GPUs it hears of."""
    of: int
    """How many there are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Somebody has changed MIG mode or instances."""

    gpus: tuple[str, ...]
    """UUIDs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The listener's last words; NOT_SUPPORTED: this driver does not tell of changes."""

    reason: errors.Reason
    message: str


News = Watching | Changed | Failed


def encode(news: News) -> bytes:
    """Return a message as a line."""
    return json.dumps(_fields(news)).encode() + b"\n"


def decode(line: bytes) -> News:
    """Return the message of a line; a failure when it makes no sense."""
    try:
        match json.loads(line):
            case {"watching": int(gpus), "of": int(of)}:
                return Watching(gpus=gpus, of=of)
            case {"changed": [*gpus]}:
                return Changed(gpus=tuple(map(str, gpus)))
            case {"failed": str(message), "reason": reason}:
                return Failed(reason=errors.Reason(reason), message=message)
            case _:
                pass
    except ValueError:
        pass
    return Failed(reason=errors.Reason.INTERNAL, message=f"the GPU listener said {line[:80]!r}")


def _fields(news: News) -> dict[str, object]:
    match news:
        case Watching(gpus=count, of=of):
            return {"watching": count, "of": of}
        case Changed(gpus=gpus):
            return {"changed": gpus}
        case Failed(reason=reason, message=message):
            return {"failed": message, "reason": reason.value}
