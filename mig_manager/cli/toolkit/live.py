"""A view that is drawn again and again, until its reader has seen enough."""

import contextlib
import os
import re
import select
import signal
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.cli.toolkit import console
from mig_manager.core import bar, messages

_INTERVAL_S = 2.0
_ROWS = 24  # of a terminal without a known size
_BEGIN, _END = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""The other screen of the terminal, without a cursor, and back (xterm's control sequences).

There the end of a long line is cut off: wrapped, it would scroll the view on a narrow terminal."""
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|[\s\S]")
"""An arrow or the like is a sequence that begins with escape."""


class View(NamedTuple):
    """What is to be seen now."""

    text: str
    lines: Mapping[str, str]
    """For a reader that is no terminal: a line for each thing, written when it is another."""


def require_text(output_format: str) -> None:
    """Raise UsageError if an output format is for programs."""
    if output_format in ("json", "yaml"):
        raise errors.UsageError("--watch shows text; repeat the command for data")


def run(
    terminal: console.Console,
    refresh: Callable[[], View],
    press: Callable[[str], View | None] | None = None,
) -> int:
    """Show what ``refresh`` returns until ``q`` is typed; in a pipe write the lines that change.

    Args:
        terminal: Where.
        refresh: Observes, and returns what is to be seen then.
        press: Takes a key, a character or the terminal's sequence for an arrow, and returns what
            is to be seen then; None: the reader has seen enough. Without it only ``q`` counts.

    Returns:
        The exit status.

    Raises:
        AnswerLostError: Standard output cannot be written.
        BrokenPipeError: The reader has ended.
        MigManagerError: The first ``refresh`` failed. Later failures are shown.
    """
    now_iso = host.SystemClock().now_iso
    view, seen_at, trouble, written = refresh(), now_iso(), "", dict[str, str]()
    is_terminal = terminal.stdout.isatty()
    with (_drawn if is_terminal else _pipe)(terminal) as wait:
        while True:
            if is_terminal:
                _draw(terminal, view.text, trouble)
            else:
                written = _write_changes(terminal, {**view.lines, "": trouble}, written)
            keys = wait()
            if keys is None or (not press and {"q", "Q"} & set(keys)):
                return console.DONE
            try:
                if keys and press:
                    for key in keys:
                        if (pressed := press(key)) is None:
                            return console.DONE
                        view = pressed
                    continue
                view, seen_at, trouble = refresh(), now_iso(), ""
            except errors.MigManagerError as error:
                trouble = f"not up to date since {seen_at}: {error.message}"


def _write_changes(
    terminal: console.Console, lines: Mapping[str, str], before: Mapping[str, str]
) -> dict[str, str]:
    now = host.SystemClock().now_iso()
    gone = {name: f"{name} is gone" for name in before.keys() - lines.keys()}
    for name, line in {**lines, **gone}.items():
        if line and line != before.get(name):
            terminal.say(f"{now} {messages.printable(line, ' ')}")
    return dict(lines)


@contextlib.contextmanager
def _pipe(terminal: console.Console) -> Iterator[Callable[[], Sequence[str] | None]]:
    """Give a wait for the next refresh, which notices that the reader has ended."""
    reader = select.poll()
    with contextlib.suppress(OSError, ValueError):
        reader.register(terminal.stdout.fileno(), 0)

    def wait() -> Sequence[str] | None:
        if any(events & select.POLLERR for _, events in reader.poll(_INTERVAL_S * 1000)):
            raise BrokenPipeError
        return ()

    yield wait


class _Screen:
    """The other screen of a terminal, and its keyboard."""

    def __init__(self, terminal: console.Console) -> None:
        self._terminal = terminal
        self.keyboard = terminal.stdin.fileno() if terminal.stdin.isatty() else None
        self._before = None if self.keyboard is None else termios.tcgetattr(self.keyboard)
        self.received: list[int] = []
        """Signals that end the program."""

    def begin(self) -> None:
        """Show it."""
        if self.keyboard is not None:
            # One key at a time, and Ctrl-C as ever.
            tty.setcbreak(self.keyboard)
        self._write(_BEGIN)

    def end(self) -> None:
        """Leave the terminal as it was."""
        self._write(_END)
        if self.keyboard is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._before)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Stop, or end by KeyboardInterrupt, at once: a refresh may hang."""
        if number == signal.SIGTSTP:
            self.end()
            signal.raise_signal(signal.SIGSTOP)
            self.begin()
        elif number != signal.SIGWINCH:
            self.received.append(number)
            if len(self.received) == 1:
                raise KeyboardInterrupt

    def _write(self, sequence: str) -> None:
        # A signal may have interrupted a write to the stream, which allows no second one.
        with contextlib.suppress(OSError):
            os.write(self._terminal.stdout.fileno(), sequence.encode())


@contextlib.contextmanager
def _drawn(terminal: console.Console) -> Iterator[Callable[[], Sequence[str] | None]]:
    """Give a wait for the next refresh, which returns the keys typed; None: it is over.

    The terminal is as before afterwards, also after a signal that ends the program, which then
    takes effect, and while the program is stopped (Ctrl-Z).
    """
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    screen = _Screen(terminal)
    before_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def wait() -> Sequence[str] | None:
        keyboard = screen.keyboard
        sources = [woken] if keyboard is None else [woken, keyboard]
        ready, _, _ = select.select(sources, [], [], _INTERVAL_S)
        if woken in ready:
            os.read(woken, 256)
        if screen.received:
            return None
        if keyboard is None or keyboard not in ready:
            return ()
        typed = os.read(keyboard, 256).decode(errors="replace")
        return _KEYS.findall(typed) or None

    handled = host.handled_signals(screen.receive, signal.SIGWINCH, signal.SIGTSTP)
    try:
        with handled, contextlib.ExitStack() as exits:
            exits.callback(screen.end)
            screen.begin()
            yield wait
    finally:
        signal.set_wakeup_fd(before_fd)
        os.close(woken)
        os.close(wake)
        if screen.received:
            signal.raise_signal(screen.received[0])


def _draw(terminal: console.Console, text: str, trouble: str) -> None:
    """Draw as many lines as the terminal has, and below them what else there is to say."""
    rows = os.get_terminal_size(terminal.stdout.fileno()).lines
    lines = bar.harmless(text).split("\n")
    shown = lines[: max(1, (rows or _ROWS) - 2)]
    key = "q" if terminal.stdin.isatty() else "Ctrl-C"
    hint = f"{host.SystemClock().now_iso()}  {key} quits"
    if len(shown) < len(lines):
        hint += f"  {len(lines) - len(shown)} more lines"
    last = messages.printable(trouble, " ") or hint
    # A row is erased before it is written: behind a row of full width the cursor stays on the last
    # character. Without a newline at the end, which would scroll.
    drawn = "".join(f"{_REST_OF_LINE}{line}\r\n" for line in shown)
    terminal.write(f"{_HOME}{drawn}{_REST}{last}")
