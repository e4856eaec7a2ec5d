"""How often a wait looks at the world."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Often at first, because most waits are short; then ever more seldom, to spare the API."""

    first_s: float = 0.05
    max_s: float = 1.0
    factor: float = 1.6

    def delay_s(self, turn: int) -> float:
        """Return the pause before look number ``turn`` (from 0)."""
        return min(self.max_s, self.first_s * self.factor ** min(turn, 64))
