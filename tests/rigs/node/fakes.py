"""Fakes of small ports: clock, request, lock, watch of the pods, telemetry, layout file."""

import collections
import contextlib
import datetime as dt
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core import ports

_MAX_WAITS = 10_000  # far more than a run has


class FakeClock:
    """Time that passes only by waiting; each wait advances the node."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waits = 0
        self.jump_s = 0.0
        """How far the wall clock was put forward, or back."""
        self.on_wait: list[Callable[[], object]] = []

    def forget_waits(self) -> None:
        """Count the waits from here, in a test of many runs."""
        self._waits = 0

    def now_iso(self, *, after_s: float = 0.0) -> str:
        when = dt.datetime.fromtimestamp(self.unix_s() + after_s, dt.UTC)
        return when.strftime("%Y-%m-%dT%H:%M:%SZ")

    def monotonic(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return 1e9 + self.now_s + self.jump_s

    def wait(self, seconds: float) -> None:
        self._waits += 1
        if self._waits > _MAX_WAITS:
            # No handler of the agent catches this, as it would an AssertionError.
            pytest.fail("the wait does not end")
        self.now_s += max(seconds, 0.001)
        for callback in self.on_wait:
            callback()


class FakeCancellation:
    """A request that is superseded at its n-th check, or when a condition holds, or never."""

    def __init__(
        self,
        clock: FakeClock,
        *,
        ends_at: int | None = None,
        ends_when: Callable[[], bool] = lambda: False,
        is_replaced: bool = False,
    ) -> None:
        self._clock = clock
        self._ends_at = ends_at
        self._ends_when = ends_when
        self._is_replaced = is_replaced
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        is_over = self._ends_at is not None and self.checks >= self._ends_at
        if is_over or self._ends_when():
            by = errors.SupersededBy
            raise errors.Superseded("test", by.OTHER_LAYOUT if self._is_replaced else by.STOP)

    def wait(self, seconds: float) -> None:
        self._clock.wait(seconds)
        self.check()

    def pause(self, seconds: float) -> None:
        self.wait(seconds)


class FakeLock:
    """A lock that refuses its first tries, as if another manager had it."""

    def __init__(self, *, refusals: int = 0) -> None:
        self.refusals = refusals
        self.is_locked = False
        self.descriptions: list[str] = []
        """The last ones: some tests play thousands of runs, and measure what they leave."""

    @contextlib.contextmanager
    def hold(self, doing: str, *, changes_gpus: bool = True) -> Iterator[None]:
        if self.refusals:
            self.refusals -= 1
            raise errors.LockedError("another manager is at work: agent")
        assert not self.is_locked, f"{doing}, within {self.descriptions[-1]}"
        self.descriptions = [*self.descriptions[-9:], doing]
        self.is_locked = True
        try:
            yield
        finally:
            self.is_locked = False


class FakePodWatch:
    """The watch of a node's pods: whether it goes on after a change."""

    def __init__(self) -> None:
        self.is_kept = False

    def expect_change(self) -> None: ...

    def keep(self) -> None:
        self.is_kept = True

    def release(self) -> None:
        self.is_kept = False

    def dismiss(self) -> None: ...


class FakeTelemetry(ports.Telemetry):
    """Notes what is reported: the positional arguments, by the name of the event."""

    def __init__(self) -> None:
        self.events = collections.defaultdict[str, list[tuple[Any, ...]]](list)
        for name in vars(ports.Telemetry):
            if not name.startswith("_"):
                setattr(self, name, functools.partial(self._note, name))

    def _note(self, name: str, *arguments: Any, **_named: object) -> None:
        self.events[name].append(arguments)


class FakeTextSource:
    def __init__(self, text: str, *, name: str = "test.yaml") -> None:
        self.text = text
        self.name = name

    def read(self) -> str:
        return self.text
