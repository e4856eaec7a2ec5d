"""A simulated node whose GPUs are reset by its ``nvidia-smi``."""

import contextlib
import pathlib
from collections.abc import Collection, Sequence

import pytest

from mig_manager import errors
from mig_manager.adapters.host import gpu_reset, programs
from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvidia_smi
from tests.rigs.host import proc_tree
from tests.rigs.node.gpu_values import mode_step
from tests.rigs.node.nvml_rig import ON, NvmlRig
from tests.rigs.programs import write_script

WAITING = states.Options(resets_itself=False)
Gpus = Sequence[model.Gpu]


class ResetMachine:
    """A simulated node whose GPUs wait for their mode, its ``nvidia-smi``, and its ``/proc``."""

    def __init__(self, rig: NvmlRig, folder: pathlib.Path) -> None:
        self.rig = rig
        self.state = rig.state
        self.tool = folder / "bin/nvidia-smi"
        self.proc = proc_tree.ProcTree(folder / "proc")
        self.persistence_notes: list[tuple[tuple[str, ...], bool]] = []
        """GPUs whose persistence mode is noted as on or off."""
        nvidia_smi.install(self.tool.parent, rig.state.path)

    def switch(self, *indices: int, mode: model.MigMode = ON) -> tuple[model.Gpu, ...]:
        """Have a mode pending on some GPUs; return all GPUs."""
        gpus = self.rig.gpus.observe()
        with contextlib.suppress(errors.HardwareError):
            self.rig.execute(*[mode_step(gpus[index], mode) for index in indices])
        return self.rig.gpus.observe()

    def reset(self, gpus: Gpus, *, timeout_s: float = 60.0, is_repair: bool = False) -> None:
        search = programs.Programs((), search_path=str(self.tool.parent))
        smi = gpu_reset.SmiReset(search, timeout_s=timeout_s, proc=self.proc.root)
        smi.reset(gpus, self._note, is_repair=is_repair)

    def _note(self, uuids: Collection[str], *, is_on: bool) -> None:
        kinds = {client.kind for client in self.state.read().clients}
        assert states.ClientKind.PERSISTENCE_MODE in kinds
        self.persistence_notes.append((tuple(uuids), is_on))

    def refusal(self, gpus: Gpus, *, timeout_s: float = 60.0) -> errors.HostError:
        """Return the error of a reset that must reset no GPU."""
        before = self.resets
        with pytest.raises(errors.HostError) as caught:
            self.reset(gpus, timeout_s=timeout_s)
        assert self.resets == before
        return caught.value

    @property
    def resets(self) -> list[int]:
        """How often each GPU was reset or switched."""
        return [gpu.attachments for gpu in self.state.read().gpus]

    def wrap(self, script: str) -> None:
        """Have this run before the tool is called."""
        real = self.tool.rename(self.tool.with_name("real"))
        write_script(self.tool, f'{script}\nexec "{real}" "$@"')

    def say(self, text: str, *, status: int) -> None:
        """Have every reset refused with these words; questions are answered as before."""
        self.wrap(f'case "$1" in --gpu-reset) echo "{text}"; exit {status};; esac')
