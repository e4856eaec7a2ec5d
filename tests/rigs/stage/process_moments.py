"""The moments of an agent process: before and after every call of a port.

A moment's name has the side, the call and its number: ``after node.patch #3``. Reads are counted
from the last call that may change something: ``after workloads.list #2 since node.patch #3``. So
one more poll in a wait renames no other moment.
"""

import collections
import contextlib
import functools
import os
import pathlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.rigs.node import port_calls

_CHANGE = re.compile(r"before (node\.(update|patch|announce)|hooks\.run|services\.st|gpu\d+\.)")
"""The first calls of an agent that change anything."""


class MomentLog:
    """Notes every moment that a process comes to, and strikes the process at one of them.

    Args:
        log: Where moments are noted, one a line; what was noted before a kill is there after it.
            A kill follows the note of its moment before any other moment can be noted.
        strike_at: The moment; None: nowhere.
        strike_with: The signal.
    """

    def __init__(
        self,
        log: pathlib.Path,
        *,
        strike_at: str | None,
        strike_with: signal.Signals = signal.SIGKILL,
    ) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._strike_at = strike_at
        self._strike_with = strike_with
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._reads: collections.Counter[str] = collections.Counter()
        """Since the last call that may have changed something."""
        self._last = "the start"

    def begin_moment(self, what: str) -> None:
        """Note a moment; the process may not live to see the end of this call."""
        with self._lock:
            self._counts[what] += 1
            self._note(f"{what} #{self._counts[what]}")

    @contextlib.contextmanager
    def around(self, call: str) -> Iterator[None]:
        """Come to the moments before and after a call, also one that fails."""
        self._come_to("before", call)
        try:
            yield
        finally:
            self._come_to("after", call)

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a port between two moments."""
        with self.around(name):
            result = method(*args, **kwargs)
        # What a context manager does, it does at its beginning and its end.
        is_context = isinstance(result, contextlib.AbstractContextManager)
        return self._around_context(name, result) if is_context else result

    @contextlib.contextmanager
    def _around_context(
        self, name: str, context: contextlib.AbstractContextManager[object]
    ) -> Iterator[object]:
        with contextlib.ExitStack() as stack:
            with self.around(f"{name} begins"):
                result = stack.enter_context(context)
            try:
                yield result
            finally:
                with self.around(f"{name} ends"):
                    stack.close()

    def _come_to(self, side: str, call: str) -> None:
        what = f"{side} {call}"
        with self._lock:
            if call in port_calls.READS:
                self._reads[what] += 1
                self._note(f"{what} #{self._reads[what]} since {self._last}")
                return
            self._counts[what] += 1
            if side == "after":
                self._last = f"{call} #{self._counts[what]}"
                self._reads.clear()
            self._note(f"{what} #{self._counts[what]}")

    def _note(self, moment: str) -> None:
        os.write(self._log, f"{moment}\n".encode())
        if moment == self._strike_at:
            os.kill(os.getpid(), self._strike_with)


def distinct_moments(moments: Sequence[str]) -> tuple[str, ...]:
    """Return the moments at which a strike may meet a node that no other one met.

    Args:
        moments: All that an undisturbed process came to.
    """
    first = next(
        (number for number, moment in enumerate(moments) if _CHANGE.match(moment)),
        len(moments) - 1,
    )
    begun = max(number for number in range(first) if moments[number].startswith("after "))
    return tuple(
        moment
        for moment in moments[begun:]
        if moment.startswith("after ") and not _is_repeated(moment)
    )


def _is_repeated(moment: str) -> bool:
    """Return whether a moment is another poll of a wait: the agent changed nothing since."""
    name, _, anchor = moment.partition(" since ")
    return bool(anchor) and not name.endswith(" #1")


class WatchedPort:
    """Stands before a port.

    Args:
        port: The real one.
        name: What the moments call it.
        call: Makes each call: its name, the method and its arguments.
    """

    def __init__(self, port: object, name: str, call: Callable[..., Any]) -> None:
        self._port = port
        self._name = name
        self._call = call

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._port, name)
        call = functools.partial(self._call, f"{self._name}.{name}", target)
        return call if callable(target) else target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call a port that is a mere function."""
        return self._call(self._name, self._port, *args, **kwargs)
