"""Resets by ``nvidia-smi``, and the fake that stands for them: the same tests for both."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.host import gpu_reset, programs
from mig_manager.core import model, ports
from mig_manager.reasons import Reason
from mig_manager.sandbox.driver import states
from tests.adapters.host.reset_machine import WAITING, ResetMachine
from tests.rigs.node import fake_host, gpu_values, node_rig, nvml_rig, samples
from tests.rigs.node.gpu_values import mode_step
from tests.rigs.node.nvml_rig import OFF, ON

SPEC = "2xA100-SXM4-40GB"


class InMemory:
    def __init__(self) -> None:
        self._node = node_rig.NodeRig(gpus=gpu_values.gpus_of(SPEC))
        self.port: ports.GpuReset = fake_host.FakeHost(self._node)

    @property
    def gpus(self) -> Sequence[model.Gpu]:
        return self._node.gpus

    def put_off_mode(self, index: int) -> None:
        self._node.gpus = gpu_values.pending(self.gpus, mode_step(self.gpus[index], ON))

    def break_gpu(self, index: int) -> None:
        action = model.RecoveryAction.GPU_RESET
        self._node.gpus = gpu_values.with_action(self.gpus, action, index)

    def refuse(self) -> None:
        error = errors.HostError("refused", reason=Reason.RESET_REQUIRED)
        self._node.failures.add("reset.reset", error)

    def refuse_then_hang(self) -> None:
        self.refuse()

    def set_persistence(self, *, is_kept_off: bool = False) -> None:
        self._node.resets.need_persistence_off = True
        self._node.resets.keep_persistence_off = is_kept_off


class Simulated:
    def __init__(self, machine: ResetMachine) -> None:
        self._machine = machine
        self.port = self._reset_within(60.0)

    def _reset_within(self, timeout_s: float) -> ports.GpuReset:
        search = programs.Programs((), search_path=str(self._machine.tool.parent))
        return gpu_reset.SmiReset(search, timeout_s=timeout_s, proc=self._machine.proc.root)

    @property
    def gpus(self) -> Sequence[model.Gpu]:
        return self._machine.rig.gpus.observe()

    def put_off_mode(self, index: int) -> None:
        self._machine.switch(index)

    def break_gpu(self, index: int) -> None:
        self._machine.state.fail_gpu(index, action=1)

    def refuse(self) -> None:
        self._machine.say("in use by another client", status=255)

    def refuse_then_hang(self) -> None:
        once = self._machine.tool.with_name("once")
        script = f"[ -e {once} ] && exec sleep 60; touch {once}; echo in use by another; exit 255"
        self._machine.wrap(f'case "$1" in --gpu-reset) {script};; esac')
        self.port = self._reset_within(2.0)

    def set_persistence(self, *, is_kept_off: bool = False) -> None:
        for gpu in self.gpus:
            self._machine.state.add_client(
                gpu.uuid, name="", kind=states.ClientKind.PERSISTENCE_MODE
            )
        if is_kept_off:
            self._machine.wrap('case "$*" in "-pm 1"*) exit 4;; esac')


Rig = InMemory | Simulated


@pytest.fixture(params=["fake", pytest.param("adapter", marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Rig]:
    """Two GPUs without instances."""
    if request.param == "fake":
        yield InMemory()
        return
    with nvml_rig.booted(tmp_path / "state", SPEC, options=WAITING) as node:
        yield Simulated(ResetMachine(node, tmp_path))


class Notes(list[tuple[Sequence[str], bool]]):
    """What a reset notes of persistence mode."""

    def __call__(self, uuids: Collection[str], *, is_on: bool) -> None:
        self.append(([*uuids], is_on))


def test_a_reset_activates_the_pending_mode_of_its_gpus_only(rig: Rig) -> None:
    for index in (0, 1):
        rig.put_off_mode(index)

    rig.port.reset([rig.gpus[0]], Notes())

    assert [gpu.current_mode for gpu in rig.gpus] == [ON, OFF]
    assert [gpu.has_pending_mode for gpu in rig.gpus] == [False, True]


def test_a_gpu_without_a_pending_mode_is_only_reset_for_a_repair(rig: Rig) -> None:
    rig.break_gpu(0)

    with pytest.raises(errors.HostError) as caught:
        rig.port.reset([rig.gpus[0]], Notes())

    assert caught.value.reason is Reason.RESET_REQUIRED
    assert rig.gpus[0].recovers_by_reset
    rig.port.reset([rig.gpus[0]], Notes(), is_repair=True)
    assert not rig.gpus[0].recovers_by_reset


PASSTHROUGH = {"virtualization": model.Virtualization.PASSTHROUGH}
VGPU = {"virtualization": model.Virtualization.VGPU}
HOST = {"virtualization": model.Virtualization.HOST}
INSTANCES = {"gpu_instances": samples.gpu(samples.A100, "3g.20gb@0").gpu_instances}


@pytest.mark.parametrize(
    ("fields", "is_repair", "reason"),
    [
        (PASSTHROUGH, False, Reason.REBOOT_REQUIRED),
        (PASSTHROUGH, True, Reason.REBOOT_REQUIRED),
        (VGPU, False, Reason.NOT_SUPPORTED),
        (VGPU, True, Reason.NOT_SUPPORTED),
        (PASSTHROUGH | INSTANCES, False, Reason.REBOOT_REQUIRED),
        (INSTANCES, False, Reason.RESET_REQUIRED),
        (INSTANCES, True, None),
        (HOST, False, None),
    ],
)
def test_a_guests_gpu_and_one_with_instances_are_refused(
    rig: Rig, fields: dict[str, Any], *, is_repair: bool, reason: Reason | None
) -> None:
    rig.put_off_mode(0)
    gpu = dataclasses.replace(rig.gpus[0], **fields)

    with contextlib.nullcontext() if reason is None else pytest.raises(errors.HostError) as caught:
        rig.port.reset([gpu], Notes(), is_repair=is_repair)

    assert (caught and caught.value.reason) is reason
    assert rig.gpus[0].has_pending_mode is (reason is not None)


def test_a_refused_reset_changes_no_gpu(rig: Rig) -> None:
    rig.put_off_mode(0)
    rig.refuse()

    with pytest.raises(errors.HostError):
        rig.port.reset([rig.gpus[0]], Notes())

    assert rig.gpus[0].has_pending_mode


@pytest.mark.parametrize("refusal", ["", "refuse", "refuse_then_hang"])
def test_persistence_mode_is_noted_off_and_on_again(rig: Rig, refusal: str) -> None:
    rig.put_off_mode(0)
    rig.set_persistence()
    (gpu, _), notes = rig.gpus, Notes()
    if refusal:
        getattr(rig, refusal)()
        with pytest.raises(errors.HostError):
            rig.port.reset([gpu], notes)
    else:
        rig.port.reset([gpu], notes)

    assert notes == [([gpu.uuid], False), ([gpu.uuid], True)]
    assert rig.port.restore_persistence([gpu])


def test_persistence_mode_that_cannot_be_restored_stays_noted(rig: Rig) -> None:
    rig.put_off_mode(0)
    rig.set_persistence(is_kept_off=True)
    (gpu, _), notes = rig.gpus, Notes()

    rig.port.reset([gpu], notes)

    assert notes == [([gpu.uuid], False)]
    assert not rig.port.restore_persistence([gpu])
