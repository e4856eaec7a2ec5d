"""MIG mode changes through the whole pipeline, over simulated NVML and a fake cluster."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from mig_manager.adapters.host import gpu_reset, programs
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.agent import outcomes
from mig_manager.core import model, ports
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.reasons import Reason
from mig_manager.sandbox.driver import simulated_nvml, state_file, states
from testkit import nvidia_smi, nvml_faults
from tests.rigs.driver import nvml_codes
from tests.rigs.host import proc_tree
from tests.rigs.node import agents, ends, simulated_rig

LAYOUTS = """\
version: v1
mig-configs:
  all:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
  none:
  - {devices: all, mig-enabled: false}
  second:
  - {devices: [1], mig-enabled: true, mig-devices: {3g.20gb: 2}}
  hopper:
  - {devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}
  seven-of-eight:
  - {devices: [0, 1, 2, 4, 5, 6, 7], mig-enabled: true, mig-devices: {HALF: 2}}
  - {devices: [3], mig-enabled: false}
  eight:
  - {devices: [0, 1, 2, 4, 5, 6, 7], mig-enabled: true, mig-devices: {HALF: 2}}
  - {devices: [3], mig-enabled: true, mig-devices: {HALF: 1}}
"""
ONLY_BY_TOOL = states.Options(resets_itself=False)
VIRTUAL = states.Options(virtualization=model.Virtualization.PASSTHROUGH)


class ModeRig(simulated_rig.SimulatedRig):
    """A node that can be rebooted, and reset by the real adapter; implements that port."""

    def __init__(self, folder: pathlib.Path, spec: str, options: states.Options) -> None:
        path = folder / "state"
        state_file.SharedState(path).create(spec, options=options)
        nvml_faults.install(path)
        super().__init__(nvml_faults.SharedState(path))
        self.advance()
        self.reset_requests: list[list[int]] = []
        self.before_reset: Callable[[], object] = lambda: None
        nvidia_smi.install(folder / "bin", path)
        self._layouts = LAYOUTS.replace("HALF", "3g.40gb" if "h100" in spec else "3g.20gb")
        self._nvml = nvml_gpus.NvmlGpus(in_use_timeout_s=5.0, clock=self.clock)
        self._smi = gpu_reset.SmiReset(
            programs.Programs((), search_path=str(folder / "bin")),
            proc=proc_tree.ProcTree(folder / "proc").root,
        )

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        record: ports.RecordPersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        self.reset_requests.append([gpu.index for gpu in gpus])
        self.before_reset()
        self._smi.reset(gpus, record, is_repair=is_repair)

    def restore_persistence(self, gpus: Sequence[model.Gpu]) -> bool:
        return self._smi.restore_persistence(gpus)

    def agent(self, layout: str) -> agents.AgentInMemory:
        """Return an agent that has just started."""
        return agents.start(
            self,
            layout,
            layouts=self._layouts,
            gpus=self._nvml,
            boot_id=self.state.boot_id,
            reset=self,
        )

    def run_agent(self, layout: str) -> outcomes.Outcome:
        """Start an agent and let it do its work once."""
        return agents.run(self, layout, by=self.agent(layout))

    def run_to(self, layout: str, reason: Reason, text: str = "") -> None:
        """Run; check reason and message, and that the node is restored."""
        ends.run_to(self, layout, reason, text, by=self.agent(layout))

    def assert_unchanged(self) -> None:
        """Check that no GPU was reset or has MIG mode, and that the node was not rebooted."""
        assert (self.attachments, self.host.reboots) == ([0, 0], 0)
        assert self.modes == [(False, False)] * 2

    def go_down(self, layout: str) -> None:
        """Run until the signal to end comes with a reboot, and reboot."""
        before = self.host.reboots
        ends.supersede(
            self,
            layout,
            by=self.agent(layout),
            ends_when=lambda: self.host.reboots > before,
        )
        self.reboot()

    def observe(self) -> tuple[model.Gpu, ...]:
        return self._nvml.observe()

    def others(self, index: int) -> list[states.GpuState]:
        return [gpu for at, gpu in enumerate(self.state.read().gpus) if at != index]

    @property
    def attachments(self) -> list[int]:
        """How often each GPU was reset."""
        return [gpu.attachments for gpu in self.state.read().gpus]

    @property
    def modes(self) -> list[tuple[bool, bool]]:
        return [(gpu.is_enabled, gpu.is_pending) for gpu in self.state.read().gpus]

    def open_second_gpu(
        self, name: str, kind: states.ClientKind = states.ClientKind.COMPUTE
    ) -> states.Client:
        """Have a program outside of pods open it."""
        return self.state.add_client(self.state.boards[1].uuid, name=name, pid=4711, kind=kind)

    def break_calls(self, function: str, *, gpu: int | None = None, first: int = 1) -> None:
        """Have the driver answer that a GPU needs a reset."""
        code = states.Code.RESET_REQUIRED
        fault = nvml_faults.Fault(function=function, gpu=gpu, first=first, count=None, code=code)
        self.state.add_fault(fault)


Boot = Callable[..., ModeRig]


@pytest.fixture
def boot(tmp_path: pathlib.Path) -> Iterator[Boot]:
    def start(spec: str = "2xa100-sxm4-40gb", options: states.Options | None = None) -> ModeRig:
        return ModeRig(tmp_path, spec, options or states.Options())

    with contextlib.ExitStack() as stack:
        stack.callback(simulated_nvml.load, None)
        yield start


def test_a_gpu_whose_mode_waits_is_reset_and_its_neighbour_is_not(boot: Boot) -> None:
    rig = boot(options=ONLY_BY_TOOL)

    rig.run_to("second", Reason.APPLIED)

    assert rig.reset_requests == [[1]]
    assert rig.attachments == [0, 1]
    assert len(rig.observe()[1].mig_uuids) == 2


@pytest.mark.slow
def test_a_mode_that_was_already_pending_is_activated(boot: Boot) -> None:
    rig = boot(options=VIRTUAL)
    assert rig.run_agent("all").reason is Reason.REBOOT_REQUIRED
    rig.state.set_options(ONLY_BY_TOOL)

    assert rig.run_agent("all").state is run_status.State.SUCCESS
    assert rig.attachments == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("reattaches", [True, False])
def test_reset_switches_mig_on_and_off(boot: Boot, *, reattaches: bool) -> None:
    rig = boot(options=dataclasses.replace(ONLY_BY_TOOL, reattaches=reattaches))

    assert rig.run_agent("all").state is run_status.State.SUCCESS
    assert rig.run_agent("none").state is run_status.State.SUCCESS
    assert rig.modes == [(False, False)] * 2
    assert rig.attachments == [2, 2]


MONITOR = ("/bin/dcgm", states.ClientKind.MONITOR)
PROCESS = ("/bin/train", states.ClientKind.COMPUTE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "client", "message", "persistence", "reset_requests"),
    [
        # NVML does not list monitors.
        pytest.param(states.Options(), MONITOR, "", [], [], id="monitor"),
        pytest.param(ONLY_BY_TOOL, MONITOR, "", [], [[1]], id="monitor, by nvidia-smi"),
        *(
            pytest.param(
                *(states.Options(), PROCESS, "train (pid 4711)", [kind], [[1]]),
                id=f"process beside {kind.value}",
            )
            for kind in (
                states.ClientKind.PERSISTENCE_DAEMON,
                states.ClientKind.PERSISTENCE_MODE,
            )
        ),
    ],
)
def test_mode_change_waits_for_gpu_clients_but_not_for_persistence(
    options: states.Options,
    client: tuple[str, states.ClientKind],
    message: str,
    persistence: list[states.ClientKind],
    reset_requests: list[list[int]],
    boot: Boot,
) -> None:
    rig = boot(options=options)
    rig.host.may_reboot = True
    for kind in persistence:
        rig.open_second_gpu("nvidia-persistenced", kind)
    opened = rig.open_second_gpu(*client)

    rig.run_to("second", Reason.IN_USE, message)
    rig.assert_unchanged()

    rig.reset_requests.clear()
    rig.state.remove_client(opened)
    rig.run_to("second", Reason.APPLIED)
    assert (rig.reset_requests, rig.attachments[0]) == (reset_requests, 0)
    remaining = rig.state.read().clients_of(rig.state.boards[1].uuid)
    assert [each.kind for each in remaining] == persistence


def test_mode_change_waits_for_a_process_that_starts_before_the_reset(boot: Boot) -> None:
    rig = boot(options=ONLY_BY_TOOL)
    # A reboot would be the next thing to try.
    rig.host.may_reboot = False
    late: list[states.Client] = []
    rig.before_reset = lambda: late.extend([] if late else [rig.open_second_gpu("/bin/late")])

    rig.run_to("second", Reason.IN_USE, "late (pid 4711)")
    rig.assert_unchanged()

    rig.reset_requests.clear()
    rig.state.remove_client(*late)
    rig.run_to("second", Reason.APPLIED)
    assert (rig.reset_requests, rig.attachments[0]) == ([[1]], 0)


@pytest.mark.slow
def test_linked_gpus_are_reset_only_together(boot: Boot) -> None:
    rig = boot(options=dataclasses.replace(ONLY_BY_TOOL, linked_gpus=((0, 1),)))

    why = "can only be reset together with 00000000:07:00.0"
    rig.run_to("second", Reason.RESET_REQUIRED, why)
    assert rig.attachments == [0, 0]

    rig.run_to("all", Reason.APPLIED)
    assert rig.attachments == [1, 1]


def test_a_faulty_gpu_neither_reboots_the_node_nor_evicts_a_pod(boot: Boot) -> None:
    rig = boot()
    rig.run_to("all", Reason.APPLIED)
    rig.host.may_reboot = True
    rig.break_calls("nvmlDeviceGetHandleBy*", first=2)
    before = set(rig.pods)

    rig.run_agent("all")

    assert rig.host.reboots == 0
    assert before <= set(rig.pods)
    ends.assert_restored(rig)


def test_creation_that_a_faulty_gpu_refuses_is_not_retried(boot: Boot) -> None:
    rig = boot()
    rig.host.may_reboot = True
    rig.break_calls("nvmlDeviceCreateGpuInstance*", gpu=1)

    outcome = rig.run_agent("second")

    assert outcome.reason is Reason.GPU_NEEDS_RESET
    assert not outcome.should_retry
    assert "cannot create GPU instance 3g.20gb" in outcome.message
    assert "every step succeeded" not in outcome.message
    assert (rig.reset_requests, rig.host.reboots) == ([], 0)
    ends.assert_restored(rig)


def test_a_virtual_machine_reboots_once_if_allowed_and_gets_its_layout(boot: Boot) -> None:
    rig = boot(options=VIRTUAL)

    why = "passed through to this virtual machine"
    rig.run_to("all", Reason.REBOOT_REQUIRED, why)
    assert rig.reset_requests == []
    assert rig.modes == [(False, True)] * 2

    rig.host.may_reboot = True
    rig.go_down("all")

    assert rig.node_object.labels[well_known.STATE_LABEL] == "rebooting"
    rig.run_to("all", Reason.APPLIED)
    assert (rig.reset_requests, rig.host.reboots) == ([], 1)
    assert all(len(gpu.mig_uuids) == 2 for gpu in rig.observe())


def test_a_reboot_that_did_not_bring_the_mode_is_never_followed_by_another(boot: Boot) -> None:
    rig = boot(options=VIRTUAL)
    rig.host.may_reboot = True
    rig.go_down("all")
    # Some hypervisors keep the GPU as it was until the machine is stopped and started.
    stuck = tuple(
        dataclasses.replace(gpu, is_enabled=False, is_pending=False)
        for gpu in rig.state.read().gpus
    )
    rig.state.update(lambda now: dataclasses.replace(now, gpus=stuck))

    for _ in range(3):
        rig.run_to("all", Reason.REBOOT_REQUIRED)
        assert rig.host.reboots == 1


@pytest.mark.slow
def test_machine_that_cannot_reset_its_gpus_reboots_if_allowed(boot: Boot) -> None:
    rig = boot(options=ONLY_BY_TOOL)
    rig.host.may_reboot = True
    # The driver does not report that this is a virtual machine; nvidia-smi refuses all the same.
    rig.before_reset = lambda: rig.state.set_options(VIRTUAL)

    rig.go_down("second")

    assert rig.reset_requests == [[1]]
    assert rig.run_agent("second").state is run_status.State.SUCCESS
    assert rig.host.reboots == 1


def test_a_vgpu_guest_is_refused_before_any_pod_is_evicted(boot: Boot) -> None:
    rig = boot(options=states.Options(virtualization=model.Virtualization.VGPU))
    rig.occupy()
    pods = dict(rig.pods)

    rig.run_to("all", Reason.NOT_SUPPORTED, "only its host can partition it")

    assert rig.pods == pods


def test_a_change_on_a_vgpu_host_ends_with_what_its_virtual_machines_need(boot: Boot) -> None:
    rig = boot(options=states.Options(virtualization=model.Virtualization.HOST))

    rig.run_to("all", Reason.APPLIED, "('sriov-manage -e ADDRESS' for 0000:07:00.0, 0000:0f:00.0)")


def test_failure_on_a_vgpu_host_names_virtual_machines_as_users(boot: Boot) -> None:
    rig = boot(options=states.Options(virtualization=model.Virtualization.HOST))
    rig.state.add_client(rig.state.boards[0].uuid, name="nvidia-vgpu-mgr", pid=4711)

    rig.run_to("all", Reason.IN_USE, "stop the machines with vGPUs")


@pytest.mark.parametrize(
    ("spec", "layout", "is_kept"),
    [("2xa100-sxm4-40gb", "all", True), ("2xh100-sxm5-80gb", "hopper", False)],
    ids=["ampere", "hopper"],
)
def test_a_layout_is_back_after_a_reboot_that_keeps_or_loses_the_mode(
    spec: str, layout: str, boot: Boot, *, is_kept: bool
) -> None:
    rig = boot(spec)
    rig.host.may_reboot = True
    assert rig.run_agent(layout).state is run_status.State.SUCCESS
    before = [[gi.placement for gi in gpu.gpu_instances] for gpu in rig.observe()]
    rig.reboot()
    assert rig.modes == [(is_kept, is_kept)] * 2
    resets = rig.attachments

    assert rig.run_agent(layout).state is run_status.State.SUCCESS

    assert [[gi.placement for gi in gpu.gpu_instances] for gpu in rig.observe()] == before
    assert (rig.reset_requests, rig.host.reboots) == ([], 0)
    assert (rig.attachments == resets) is is_kept


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param("8xa100-sxm4-40gb", states.Options(), id="ampere"),
        pytest.param("8xa100-sxm4-40gb", ONLY_BY_TOOL, id="ampere, by nvidia-smi"),
        pytest.param("8xh100-sxm5-80gb", states.Options(), id="hopper"),
    ],
)
@pytest.mark.parametrize(
    ("before", "after"), [("seven-of-eight", "eight"), ("eight", "seven-of-eight")]
)
@pytest.mark.slow
def test_mode_change_of_one_gpu_leaves_the_other_seven_alone(
    before: str, after: str, spec: str, options: states.Options, boot: Boot
) -> None:
    rig = boot(spec)
    assert rig.run_agent(before).state is run_status.State.SUCCESS
    rig.occupy()
    rig.reset_requests.clear()
    rig.state.set_options(options)
    rig.state.log_calls()
    fourth = frozenset({rig.observe()[3].uuid, *rig.observe()[3].mig_uuids})
    others = rig.others(3)
    staying = {uid for uid, devices in rig.kubelet.devices_by_pod.items() if not devices & fourth}
    clients = [client for client in rig.state.read().clients if client.gpu_uuid not in fourth]

    rig.run_to(after, Reason.APPLIED)

    assert rig.others(3) == others
    assert len(staying) == 14
    assert staying == rig.kubelet.devices_by_pod.keys() & staying & rig.pods.keys()
    assert list(rig.state.read().clients) == clients
    calls = nvml_faults.read_calls(rig.state.path)
    assert {call.gpu for call in calls if call.function in nvml_codes.CHANGES} == {3}
    assert rig.reset_requests == ([[3]] if options is ONLY_BY_TOOL else [])
