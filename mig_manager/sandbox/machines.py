"""A simulated node with its GPUs, and the real agent on it in a process of its own."""

import contextlib
import dataclasses
import pathlib
import signal
import subprocess
from collections.abc import Callable, Sequence

from mig_manager.adapters.host import subprocesses
from mig_manager.sandbox.node import cluster_view, sandbox_node

_STOP_TIMEOUT_S = 15.0


class Process:
    """One of our programs, with its output in a file.

    Args:
        arguments: Its command line.
        log: The file.
        group: The process group to join, such as a guard's; None: this process's.
    """

    def __init__(self, *arguments: str, log: pathlib.Path, group: int | None = None) -> None:
        self._log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(  # noqa: S603 - our own program and arguments
                subprocesses.python("mig_manager", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=group,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def last_line(self) -> str:
        """The last line of its output; empty without one."""
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it and return its exit status; send SIGKILL if it does not end in time."""
        self._process.send_signal(number)
        try:
            return self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Machine:
    """One node of a cluster, and the agent on it.

    Args:
        name: The node's name.
        folder: Where its files are.
        options: How the node behaves; the name is set here.
    """

    def __init__(self, name: str, folder: pathlib.Path, options: sandbox_node.NodeOptions) -> None:
        self.name = name
        self.state_file = folder / f"{name}.json"
        """The simulated GPUs, to be created before ``start``."""
        self.log = folder / f"{name}.log"
        """The agent's log; see ``log_to``."""
        self.socket = folder / f"{name}.sock"
        self._options = dataclasses.replace(options, name=name)
        self.agent: Process | None = None
        """The running agent."""

    def start(
        self,
        exits: contextlib.ExitStack,
        cluster: cluster_view.ClusterView,
        fail: Callable[[OSError], None],
    ) -> sandbox_node.SandboxNode:
        """Run kubelet and device plugin until ``exits`` are closed; ``fail`` as for the node."""
        return exits.enter_context(
            sandbox_node.SandboxNode(
                cluster, self.state_file, self.socket, options=self._options, fail=fail
            )
        )

    def arguments(
        self, config_file: pathlib.Path, kubeconfig: pathlib.Path, further: Sequence[str]
    ) -> list[str]:
        """Return the command line of its agent, without program and command."""
        return [
            *("--node-name", self.name),
            *("--config-file", str(config_file)),
            *("--kubeconfig", str(kubeconfig)),
            *("--pod-resources-socket", str(self.socket)),
            *("--simulate-state", str(self.state_file)),
            *further,
        ]

    def log_to(self, log: pathlib.Path) -> None:
        """Let the agent log to another file from its next start on."""
        self.log = log

    def start_agent(self, arguments: Sequence[str], group: int | None = None) -> None:
        """Start its agent, which must not be running; ``group`` as for ``Process``."""
        self.agent = Process("agent", *arguments, log=self.log, group=group)

    def stop_agent(self, number: int = signal.SIGTERM) -> int:
        """End the agent, if it runs, and return its exit status."""
        agent, self.agent = self.agent, None
        return 0 if agent is None else agent.end(number)
