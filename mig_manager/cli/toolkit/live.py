"""Refresh a view on the terminal until the user quits."""

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
from mig_manager.core import messages
from mig_manager.core.display import styles
from mig_manager.core.settings import node_settings

_INTERVAL_S = 2.0
_ROWS = 24  # if the size of the terminal is unknown
_BEGIN, _END = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Enter and leave the alternate screen, without a cursor (xterm's control sequences).

Long lines are cut there: on a narrow terminal, a wrapped line would scroll the view."""
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_KEYS = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|[\s\S]")
"""Arrows and similar keys are sequences that begin with escape."""


class View(NamedTuple):
    """The current content."""

    text: str
    lines: Mapping[str, str]  # without a terminal: a line for every item, written when it changes


def require_text(output_format: node_settings.OutputFormat) -> None:
    """Raise UsageError if an output format is for programs."""
    if output_format.is_data:
        raise errors.UsageError("--watch shows text; repeat the command for data")


def run(
    terminal: console.Console,
    refresh: Callable[[], View],
    press: Callable[[str], View | None] | None = None,
) -> int:
    """Show what ``refresh`` returns until ``q`` is pressed; in a pipe, write changed lines.

    Args:
        terminal: Where to write.
        refresh: Observes, and returns the new view.
        press: Takes a key (a character, or the terminal's sequence for an arrow) and returns the
            new view, or None to quit. Without it, only ``q`` works.

    Returns:
        The exit status.

    Raises:
        AnswerLostError: Standard output cannot be written.
        BrokenPipeError: The reader has ended.
        MigManagerError: The first ``refresh`` failed. Later failures are shown.
    """
    now_iso = host.SystemClock().now_iso
    view = refresh()
    refreshed_at = now_iso()
    trouble = ""
    written = dict[str, str]()
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
                view = refresh()
                refreshed_at = now_iso()
                trouble = ""
            except errors.MigManagerError as error:
                trouble = f"not up to date since {refreshed_at}: {error.message}"


def _write_changes(
    terminal: console.Console, lines: Mapping[str, str], before: Mapping[str, str]
) -> dict[str, str]:
    now = host.SystemClock().now_iso()
    removed = {name: f"{name} is gone" for name in before.keys() - lines.keys()}
    for name, line in {**lines, **removed}.items():
        if line and line != before.get(name):
            terminal.say(f"{now} {messages.printable(line, ' ')}")
    return dict(lines)


@contextlib.contextmanager
def _pipe(terminal: console.Console) -> Iterator[Callable[[], Sequence[str] | None]]:
    """Yield a function that waits for the next refresh and notices that the reader has ended."""
    reader = select.poll()
    with contextlib.suppress(OSError, ValueError):
        reader.register(terminal.stdout.fileno(), 0)

    def wait() -> Sequence[str] | None:
        if any(events & select.POLLERR for _, events in reader.poll(_INTERVAL_S * 1000)):
            raise BrokenPipeError
        return ()

    yield wait


class _Screen:
    """The alternate screen of a terminal, and its keyboard."""

    def __init__(self, terminal: console.Console) -> None:
        self._terminal = terminal
        self.keyboard = terminal.stdin.fileno() if terminal.stdin.isatty() else None
        self._before = None if self.keyboard is None else termios.tcgetattr(self.keyboard)
        self.received: list[int] = []
        """Signals that end the program."""

    def begin(self) -> None:
        """Switch to the alternate screen."""
        if self.keyboard is not None:
            # Read single keys, but keep Ctrl-C as a signal.
            tty.setcbreak(self.keyboard)
        self._write(_BEGIN)

    def end(self) -> None:
        """Restore the terminal."""
        self._write(_END)
        if self.keyboard is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._before)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Stop the process or raise KeyboardInterrupt at once, because a refresh may hang."""
        if number == signal.SIGTSTP:
            self.end()
            signal.raise_signal(signal.SIGSTOP)
            self.begin()
        elif number != signal.SIGWINCH:
            self.received.append(number)
            if len(self.received) == 1:
                raise KeyboardInterrupt

    def _write(self, sequence: str) -> None:
        # A signal may have interrupted a write, and the stream allows no nested write.
        with contextlib.suppress(OSError):
            os.write(self._terminal.stdout.fileno(), sequence.encode())


@contextlib.contextmanager
def _drawn(terminal: console.Console) -> Iterator[Callable[[], Sequence[str] | None]]:
    """Yield a function that waits for the next refresh and returns the keys, or None to quit.

    The terminal is restored afterwards, while the program is stopped (Ctrl-Z), and before a signal
    ends the program.
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
    """Draw as many lines as fit, and a hint or the current problem below."""
    rows = os.get_terminal_size(terminal.stdout.fileno()).lines
    lines = styles.harmless(text).split("\n")
    shown = lines[: max(1, (rows or _ROWS) - 2)]
    key = "q" if terminal.stdin.isatty() else "Ctrl-C"
    hint = f"{host.SystemClock().now_iso()}  {key} quits"
    if len(shown) < len(lines):
        hint += f"  {len(lines) - len(shown)} more lines"
    last = messages.printable(trouble, " ") or hint
    # Erase a row before writing it: after a full row the cursor stays on the last character.
    # A newline at the end would scroll.
    drawn = "".join(f"{_REST_OF_LINE}{line}\r\n" for line in shown)
    terminal.write(f"{_HOME}{drawn}{_REST}{last}")
