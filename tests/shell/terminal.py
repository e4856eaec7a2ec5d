"""The program in a pseudo-terminal."""

import fcntl
import os
import struct
import subprocess
import sys
import termios


def run(argv: list[str], *, columns: int, environ: dict[str, str], status: int = 0) -> str:
    """Run the program in a terminal of that width; return what it wrote."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "mig_manager", *argv]
    with subprocess.Popen(  # noqa: S603 - our own program
        command, stdin=its, stdout=its, stderr=its, env=environ
    ) as process:
        os.close(its)
        found = b""
        try:
            while chunk := os.read(ours, 65536):
                found += chunk
        except OSError:
            pass  # Linux reports EIO once the other side is closed
        finally:
            os.close(ours)
        assert process.wait(60) == status
    return found.decode()
