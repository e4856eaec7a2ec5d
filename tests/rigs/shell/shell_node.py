"""A simulated node on its own, and the program as a process on it."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys

from mig_manager.sandbox.driver import state_file, states
from testkit import nvml_faults
from tests.rigs import waiting
from tests.rigs.node import local_rig, simulated_rig
from tests.rigs.shell import commandline

_FOREVER_S = 600.0
_APPLIED: dict[tuple[str, ...], dict[str, bytes]] = {}
"""The files of nodes to which a layout has been applied."""


class ShellNode:
    """A simulated node and the program on it."""

    def __init__(
        self,
        folder: pathlib.Path,
        spec: str,
        *,
        layouts: str = local_rig.LAYOUTS_TEXT,
        options: states.Options | None = None,
        active: str = "",
    ) -> None:
        """Boot the node; ``active`` is a layout that the program has applied to it."""
        self.layouts = folder / "layouts.yaml"
        self.layouts.write_text(layouts, encoding="utf-8")
        self.path = folder / "node.json"
        state_file.SharedState(self.path).create(spec, options=options)
        self.state = nvml_faults.SharedState(self.path)
        self.journal = self.state.beside("journal")
        if active:
            self._begin_with(active, spec, layouts, str(options))

    def _begin_with(self, layout: str, *key: str) -> None:
        """Apply a layout, or copy what applying it has left on another node like this one."""
        if (state_files := _APPLIED.get((layout, *key))) is None:
            assert self.run("apply", layout).status == 0
            files = self.path.parent.glob(f"{self.path.name}*")
            state_files = {
                file.name: file.read_bytes() for file in files if file.suffix != ".lock"
            }
            _APPLIED[layout, *key] = state_files
            return
        for name, content in state_files.items():
            self.path.with_name(name).write_bytes(content)

    def command(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "mig_manager", *self.arguments(*argv)]

    def arguments(self, *argv: str) -> list[str]:
        """Return a command's arguments, with the options for this node."""
        has_file = argv[0] not in {
            "acceptance",
            "boot",
            "checkpoint",
            "export",
            "restore",
            "status",
        }
        file = ["-f", str(self.layouts)] if has_file else []
        return [*argv, "--simulate-state", str(self.path), *file]

    def run(self, *argv: str) -> commandline.Answer:
        """Run a command in this process, without a GPU worker, which is quicker."""
        try:
            answer = commandline.run(self.arguments(*argv), dict(os.environ))
        finally:
            commandline.forget()
        assert "Traceback" not in answer.err
        return answer

    def run_process(self, *argv: str) -> commandline.Answer:
        """Run a command as a process, with a GPU worker."""
        with self.start(*argv) as process:
            return commandline.wait_for_answer(process)

    def start(self, *argv: str) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
        return commandline.start(self.arguments(*argv))

    def set_options(self, options: states.Options) -> None:
        """Have another driver on the node from now on; the GPUs stay as they are."""
        self.state.update(lambda node: dataclasses.replace(node, options=options))

    def hang_in(self, function: str, *, first: int = 1) -> None:
        self.state.add_fault(nvml_faults.Fault(function=function, first=first, hang_s=_FOREVER_S))

    @property
    def is_hung(self) -> bool:
        return any(armed.strikes for armed in self.state.faults())

    @property
    def geometry(self) -> list[object]:
        return [*simulated_rig.driver_geometry(self.state)]

    def devices_of(self, profile: str, *, gpu: int = 0) -> list[str]:
        """Return the UUIDs of a GPU's MIG devices of a profile."""
        return [
            compute["uuid"]
            for instance in self.run("status", "-o", "json").data["gpus"][gpu]["gpuInstances"]
            for compute in instance["computeInstances"]
            if compute["profile"] == profile
        ]

    def use(self, profile: str, *, gpu: int = 0) -> states.Client:
        """Have a program use the MIG device of a profile."""
        (device,) = self.devices_of(profile, gpu=gpu)
        return self.state.add_client(device, name="/usr/bin/train", pid=4242)

    def kill(self, *argv: str, function: str, first: int = 1) -> None:
        """Run a command, and kill it in the middle of a call."""
        self.hang_in(function, first=first)
        with self.start(*argv) as process:
            waiting.until(lambda: self.is_hung, "the hanging call")
            process.kill()
        self.state.clear_faults()
