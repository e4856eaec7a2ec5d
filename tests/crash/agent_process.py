"""An agent process, as its stage sees it: a fork that runs ``agent_main``."""

import multiprocessing
import os
import pathlib

from tests.crash import agent_main

_STOP_S = 10.0
_FORKS = multiprocessing.get_context("forkserver")
# A fork of a process that has imported everything and used nothing is as good as a fresh start.
_FORKS.set_forkserver_preload(
    ["grpc", "mig_manager.adapters.kubelet_messages", "tests.crash.agent_main"]
)


class AgentProcess:
    """An agent process and the moments that it has come to."""

    def __init__(self, arguments: agent_main.Arguments) -> None:
        self._process = _FORKS.Process(target=_be, args=(arguments,))
        self._process.start()
        self._moments = pathlib.Path(arguments.moments)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of a process that has ended; ``-9`` after SIGKILL."""
        return self._process.exitcode

    def is_gone(self, timeout_s: float = 0.0) -> bool:
        """Wait for the process to end; return whether it did."""
        self._process.join(timeout_s)
        return self.status is not None

    def kill(self) -> None:
        """End it at once; done when it has ended."""
        self._process.kill()
        assert self.is_gone(_STOP_S)

    def moments(self) -> list[str]:
        """Return the moments in their order."""
        try:
            return self._moments.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []

    @property
    def has_served(self) -> bool:
        """Whether it waits: for the next request, or for its next retry."""
        return f"{agent_main.IDLE} #2" in self.moments()


def _be(arguments: agent_main.Arguments) -> None:
    """Run an agent in a forked process, and end it without Python's own cleanup."""
    os._exit(agent_main.serve(arguments))
