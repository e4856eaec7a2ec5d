"""The program in a pseudo-terminal."""

import contextlib
import fcntl
import os
import pathlib
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

_DEADLINE_S = 60.0


class Session:
    """A program that runs in a terminal; ``shown`` is everything that it wrote."""

    def __init__(self, process: "subprocess.Popen[bytes]", fd: int) -> None:
        self.process = process
        self.fd = fd
        self._shown = b""

    @property
    def shown(self) -> str:
        return self._shown.decode()

    def read(self) -> bool:
        """Read what there is, waiting for it; return whether more may follow."""
        ready, _, _ = select.select([self.fd], [], [], _DEADLINE_S)
        assert ready, self.shown
        try:
            chunk = os.read(self.fd, 65536)
        except OSError:
            return False  # Linux reports EIO once the other side is closed
        self._shown += chunk
        return bool(chunk)

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read until what is new matches."""
        start, deadline = len(self._shown), time.monotonic() + _DEADLINE_S
        while not (match := re.search(pattern, self._shown[start:].decode(errors="replace"))):
            assert time.monotonic() < deadline, self.shown
            assert self.read(), self.shown
        return match

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def end(self) -> int:
        """Read the rest; return the exit status."""
        deadline = time.monotonic() + _DEADLINE_S
        while self.read():
            assert time.monotonic() < deadline, self.shown
        return self.process.wait(_DEADLINE_S)


@contextlib.contextmanager
def open_session(  # noqa: PLR0913 - each is named where it is called
    argv: Sequence[str],
    *,
    columns: int,
    environ: Mapping[str, str],
    rows: int = 50,
    module: str = "mig_manager",
    has_keyboard: bool = True,
    command: Sequence[str] = (),
    cwd: pathlib.Path | None = None,
) -> Iterator[Session]:
    """Start the program, or another, in a terminal; without a keyboard its input is empty."""
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with subprocess.Popen(  # noqa: S603 - our own program
        [*(command or (sys.executable, "-m", module)), *argv],
        cwd=cwd,
        stdin=terminal if has_keyboard else subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=environ,
    ) as process:
        os.close(terminal)
        try:
            yield Session(process, controller)
        finally:
            os.close(controller)
            process.kill()


def run(argv: Sequence[str], *, columns: int, environ: Mapping[str, str], status: int = 0) -> str:
    """Run the program to its end in a terminal of that width; return what it wrote."""
    with open_session(argv, columns=columns, environ=environ) as session:
        assert session.end() == status
        return session.shown
