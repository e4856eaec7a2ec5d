"""How often each NVML function is called, and how long that takes."""

import dataclasses
import threading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What was spent on one NVML function."""

    function: str
    count: int
    seconds: float


class Meter:
    """Adds up calls from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, tuple[int, float]] = {}

    def add(self, function: str, seconds: float) -> None:
        """Count one call."""
        with self._lock:
            count, spent = self._totals.get(function, (0, 0.0))
            self._totals[function] = count + 1, spent + seconds

    def take(self) -> tuple[Calls, ...]:
        """Return the totals by name, and begin again."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return tuple(
            Calls(function=name, count=count, seconds=seconds)
            for name, (count, seconds) in sorted(totals.items())
        )


METER = Meter()
"""Of this process, as the NVML session is."""
