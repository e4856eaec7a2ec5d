"""Starts agent processes in a few milliseconds, by forking from one that has all imported.

The server is a process of one thread that never uses what it has imported, so that a fork of it
is as good as a fresh start. Orders and answers are lines of JSON on its standard streams.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import traceback
from typing import Self

import grpc

from mig_manager.adapters import kubelet_messages
from tests.crash import agent_process

_PRELOADED = (grpc, kubelet_messages)
"""What the agent imports at its first use."""
_ROOT = pathlib.Path(__file__).parents[2]
_STOP_S = 10.0


class Agent:
    """An agent process."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self._server = server
        self._exit = os.pidfd_open(pid)
        self._status: int | None = None

    def is_gone(self, timeout_s: float = 0.0) -> bool:
        """Wait for the process to end; return whether it did."""
        if self._status is not None:
            return True
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def status(self) -> int:
        """Return the exit status of the process, which has ended; ``-9`` after SIGKILL."""
        if self._status is None:
            self._status = self._server.reap(self.pid)
            os.close(self._exit)
        return self._status

    def kill(self) -> None:
        """End it at once; done when it has ended."""
        if self._status is None:
            signal.pidfd_send_signal(self._exit, signal.SIGKILL)
            assert self.is_gone(_STOP_S)
            self.status()


class ForkServer:
    """The server as its client has it; use with ``with``."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.forkserver"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate(timeout=_STOP_S)

    def start(self, order: agent_process.Order) -> Agent:
        """Start an agent process."""
        return Agent(self, self._ask(dataclasses.asdict(order)))

    def reap(self, pid: int) -> int:
        """Return the exit status of a process, once it has one."""
        return self._ask({"reap": pid})

    def _ask(self, order: dict[str, object]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    """Serve until the end of standard input."""
    # Kept from the children, who would keep the client waiting for the end of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            number = os.waitstatus_to_exitcode(status)
        else:
            number = os.fork()
            if number == 0:
                with contextlib.suppress(OSError):
                    answers.close()
                _be(agent_process.Order(**order))
        print(number, file=answers, flush=True)


def _be(order: agent_process.Order) -> None:
    """Be an agent and nothing else: what the server would do at its end is not ours."""
    status = 1
    try:
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        status = agent_process.serve(order)
    except BaseException:  # noqa: BLE001 - a fork must not go on as the server
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
