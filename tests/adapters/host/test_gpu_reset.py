"""GPUs are reset if their mode is pending and no process uses them."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.host import gpu_reset, programs, smi_status
from mig_manager.core import model
from mig_manager.reasons import Reason
from mig_manager.sandbox.driver import states
from tests.adapters.host import root_filesystems
from tests.adapters.host.reset_machine import WAITING, Gpus, ResetMachine
from tests.rigs.node import nvml_rig
from tests.rigs.node.nvml_rig import OFF, ON
from tests.rigs.programs import write_script

A100 = "a100-sxm4-40gb"
BUSY = ("InUse", "in use")
Boot = Callable[..., ResetMachine]


@pytest.fixture
def boot(tmp_path: pathlib.Path) -> Iterator[Boot]:
    with contextlib.ExitStack() as stack:

        def start(spec: str = f"2x{A100}", options: states.Options = WAITING) -> ResetMachine:
            rig = nvml_rig.booted(tmp_path / "state", spec, options=options)
            return ResetMachine(stack.enter_context(rig), tmp_path)

        yield start


@pytest.fixture
def machine(boot: Boot) -> ResetMachine:
    return boot()


@pytest.fixture
def gpus(machine: ResetMachine) -> Gpus:
    """Have a mode pending on the first GPU."""
    return machine.switch(0)


TOGETHER = "--gpu-reset -i 00000000:07:00.0,00000000:17:00.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "resets"),
    [
        ("none", [TOGETHER]),
        ("*,*", [TOGETHER, "--gpu-reset -i 00000000:07:00.0", "--gpu-reset -i 00000000:17:00.0"]),
    ],
)
def test_gpus_with_a_pending_mode_are_reset_by_one_command_unless_refused(
    boot: Boot, refused: str, resets: list[str]
) -> None:
    machine = boot(f"3x{A100}")
    gpus = machine.switch(0, 2)
    log = machine.tool.with_name("log")
    refusal = f'case "$1 $3" in --gpu-reset*{refused}) exit 255;; esac'
    machine.wrap(f'echo "$@" >> "{log}"; {refusal}')

    machine.reset([gpus[0], gpus[2]])

    assert machine.resets == [1, 0, 1]
    after = machine.rig.gpus.observe()
    assert [gpu.current_mode for gpu in after] == [ON, OFF, ON]
    assert not any(gpu.has_pending_mode for gpu in after)
    commands = log.read_text().splitlines()
    assert [line for line in commands if "reset" in line] == resets
    assert len(commands) == 2 * len(resets) + 1


@pytest.mark.slow
def test_a_gpu_in_use_does_not_block_the_reset_of_another(
    machine: ResetMachine,
) -> None:
    gpus = machine.switch(0, 1)
    machine.state.add_client(gpus[1].uuid, name="daemon", kind=states.ClientKind.MONITOR)

    with pytest.raises(errors.HostError, match="in use by processes"):
        machine.reset(gpus)

    assert machine.resets == [1, 0]


def test_no_gpu_is_reset_for_an_empty_list_or_after_a_foreign_reset(
    machine: ResetMachine, gpus: Gpus
) -> None:
    assert machine.state.reset_gpu(0) is states.Code.SUCCESS

    machine.reset(gpus[:1])

    assert machine.resets == [1, 0]
    machine.tool.unlink()
    machine.reset(())


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["none", "*,*"])
def test_a_repair_resets_each_gpu_once_without_a_pending_mode(boot: Boot, refused: str) -> None:
    machine = boot(f"3x{A100}")
    for index in (0, 2):
        machine.state.fail_gpu(index, action=1)
    gpus = machine.rig.gpus.observe()
    machine.wrap(f'case "$1 $3" in --gpu-reset*{refused}) exit 255;; esac')

    machine.reset([gpus[0], gpus[2]], is_repair=True)

    assert machine.resets == [1, 0, 1]
    assert not any(gpu.recovers_by_reset for gpu in machine.rig.gpus.observe())


@pytest.mark.parametrize(
    ("choose", "reason", "message"),
    [
        pytest.param(
            list,
            Reason.RESET_REQUIRED,
            "is not reset: no change of its MIG mode is pending",
            id="no pending mode",
        ),
        pytest.param(
            lambda gpus: [
                dataclasses.replace(gpus[0], virtualization=model.Virtualization.PASSTHROUGH)
            ],
            Reason.REBOOT_REQUIRED,
            "passed through to this virtual machine",
            id="a machine with the GPU passed through",
        ),
        pytest.param(
            lambda gpus: [dataclasses.replace(gpus[0], virtualization=model.Virtualization.VGPU)],
            Reason.NOT_SUPPORTED,
            "only its host can reset it",
            id="a vGPU",
        ),
        pytest.param(
            lambda gpus: [dataclasses.replace(gpus[0], pci_address=gpus[1].pci_address)],
            Reason.RESET_REQUIRED,
            "does not show GPU 0",
            id="another GPU at its address",
        ),
    ],
)
def test_a_gpu_that_must_not_be_reset_is_refused(
    choose: Callable[[Gpus], Gpus],
    reason: Reason,
    message: str,
    machine: ResetMachine,
    gpus: Gpus,
) -> None:
    error = machine.refusal(choose(gpus))

    assert error.reason is reason
    assert message in error.message


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 9", "ended with status 9"),
        ("echo no XML", "does not show"),
        ("echo '<nvidia_smi_log/>'", "does not show"),
        ("echo '<a>&b;</a>'", "does not show"),
    ],
)
def test_a_gpu_that_the_tool_does_not_show_is_not_reset(
    machine: ResetMachine, gpus: Gpus, script: str, message: str
) -> None:
    write_script(machine.tool, script)

    error = machine.refusal(gpus[:1])

    assert error.reason is Reason.RESET_REQUIRED
    assert message in error.message


def test_without_the_tool_no_gpu_is_reset(machine: ResetMachine, gpus: Gpus) -> None:
    machine.tool.unlink()

    error = machine.refusal(gpus[:1])

    assert error.reason is Reason.RESET_REQUIRED
    assert "found neither with the driver nor on the host" in error.message


def test_a_gpu_that_vanishes_after_its_reset_is_not_reported_unreset(
    machine: ResetMachine, gpus: Gpus, tmp_path: pathlib.Path
) -> None:
    done = tmp_path / "done"
    script = f'if [ "$1" = --gpu-reset ]; then touch {done}; elif [ -e {done} ]; then exit; fi'
    machine.wrap(script)

    with pytest.raises(errors.HostError) as caught:
        machine.reset(gpus[:1])

    assert caught.value.message.endswith(f"does not show {gpus[0]}")


def test_an_unprivileged_reset_has_the_reason_no_permission(
    machine: ResetMachine, gpus: Gpus
) -> None:
    machine.state.set_options(dataclasses.replace(WAITING, permitted=False))

    assert machine.refusal(gpus[:1]).reason is Reason.NO_PERMISSION


def test_a_gpu_with_instances_is_never_reset(boot: Boot) -> None:
    machine = boot(A100, states.Options())
    machine.rig.fill("3g.20gb")
    gpus = machine.switch(0, mode=OFF)
    assert gpus[0].has_pending_mode

    without_instances = machine.refusal([dataclasses.replace(gpus[0], gpu_instances=())])
    machine.tool.unlink()  # instances that were observed are refused without asking it
    with_instances = machine.refusal(gpus)

    assert with_instances.message == without_instances.message
    assert "it has GPU instances" in with_instances.message


# -- processes that use the GPU ---------------------------------------------------------------


def test_process_that_uses_a_gpu_prevents_every_reset_and_is_named(machine: ResetMachine) -> None:
    gpus = machine.switch(0, 1)
    pod = "0::/kubepods.slice/kubepods-pod8a0b1c2d_0001_4000_8000_0123456789ab.slice/cri.scope"
    client = machine.state.add_client(gpus[1].uuid, name="/usr/bin/python3 train.py", pid=4711)

    error = machine.refusal(gpus)

    assert error.reason is Reason.IN_USE
    assert error.message == f"{gpus[1]} is not reset while it is in use by python3 (pid 4711)"

    machine.state.remove_client(client)
    machine.proc.add(71, "/dev/nvidiactl", "/dev/nvidia1", name="dcgm-exporter", cgroup=pod)
    machine.proc.add(72, "/dev/nvidia5", name="elsewhere")
    machine.proc.add(os.getpid(), "/dev/nvidia0", name="ourselves")
    assert machine.refusal(gpus).message.endswith(
        "in use by dcgm-exporter (pid 71, pod 8a0b1c2d-0001-4000-8000-0123456789ab)"
    )
    machine.reset([gpus[0]])


def test_process_with_a_gpus_drm_node_prevents_a_reset_and_is_named(
    machine: ResetMachine, gpus: Gpus
) -> None:
    machine.proc.add_drm("0000:07:00.0", "card1")
    machine.proc.add(71, "/dev/dri/card1", name="Xorg")
    assert machine.refusal(gpus[:1]).message.endswith("in use by Xorg (pid 71)")


@pytest.mark.parametrize("name", ["nvidia-persiste", "nv-fabricmanage"])
@pytest.mark.slow
def test_daemons_that_release_the_gpu_do_not_block_a_reset(
    name: str, machine: ResetMachine, gpus: Gpus
) -> None:
    machine.proc.add(73, "/dev/nvidia0", name=name)

    machine.reset(gpus[:1])

    assert machine.resets == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("is_visible", [True, False])
def test_a_daemon_that_did_not_release_the_gpu_is_named_if_it_is_visible(
    *, is_visible: bool, machine: ResetMachine, gpus: Gpus
) -> None:
    machine.state.add_client(gpus[0].uuid, name="daemon", kind=states.ClientKind.MONITOR)
    users = "processes"
    if is_visible:
        daemon = "nvidia-persiste (pid 73, unit nvidia-persistenced.service)"
        users = f"{daemon}, and maybe by other processes"
        unit = "0::/s/nvidia-persistenced.service"
        machine.proc.add(73, "/dev/nvidia0", name="nvidia-persiste", cgroup=unit)

    error = machine.refusal(gpus[:1])

    assert error.reason is Reason.IN_USE
    assert error.message.endswith(f"in use by {users} that are not visible here")
    machine.proc.load_modules(nvidia=2, nvidia_drm=0)
    assert "unload nvidia_drm" in machine.refusal(gpus[:1]).message


# -- what the tool answers --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "reason", "message"),
    [
        ("Resetting GPU 7 is not supported.", 3, "RebootRequired", "GPU 7 is not supported."),
        ("Failed:\n  GPU 7: Not Supported", 255, "RebootRequired", "GPU 7: Not Supported"),
        ("What it says in ten years", 3, "RebootRequired", "What it says in ten years"),
        ("was successfully reset", 0, "ResetRequired", "yet their MIG mode is still pending"),
        ("$(sleep 60)", 0, "ResetRequired", "did not end within 0.5 s and was killed"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("GPU 7 is currently in use by another process.", 255, *BUSY),
                ("Failed:\n  GPU 7: In use by another client", 255, *BUSY),
                ("because it's being used by some other process", 255, *BUSY),
                ("Denied", 4, "NoPermission", "ended with status 4: Denied"),
                ("Failed", 255, "ResetRequired", "ended with status 255: Failed"),
                ("", 15, "ResetRequired", "ended with status 15"),
            )
        ),
    ],
)
def test_the_reason_of_a_refusal_is_parsed_from_its_text(
    text: str, status: int, reason: str, message: str, machine: ResetMachine, gpus: Gpus
) -> None:
    machine.say(text, status=status)

    error = machine.refusal(gpus[:1], timeout_s=0.5 if "sleep" in text else 60.0)

    assert error.reason == Reason(reason)
    assert message in error.message


def test_xml_with_gaps_warnings_and_odd_names_is_parsed() -> None:
    named = (
        "<process_info><pid>7</pid><process_name>/opt/a&#x9b;31m b</process_name></process_info>"
        "<process_info><pid>8</pid></process_info>"
        "<process_info><process_name>x</process_name></process_info>"
    )
    text = f"<gpu><uuid>GPU-1</uuid><processes>{named}</processes></gpu></nvidia_smi_log>"

    (status,) = smi_status.parse(f"<nvidia_smi_log>{text}\nWARNING: infoROM\n")
    assert status == smi_status.SmiStatus(
        uuid="GPU-1",
        minor=None,
        is_pending=False,
        is_persistent=False,
        has_instances=False,
        processes={7: "a?31m (pid 7)", 8: "process (pid 8)"},
    )


def test_nvidia_smi_is_searched_first_where_it_sees_the_drivers_daemons() -> None:
    own_root, driver = pathlib.Path("/"), pathlib.Path("/driver-root")
    roots = root_filesystems.host_roots(
        pathlib.Path("/host"), driver="/run/nvidia/driver", driver_here=driver, dev_here=driver
    )

    order = [root.path for root in gpu_reset.roots(roots)]

    assert (order[0], order[-1]) == (driver, own_root)
    assert gpu_reset.roots(root_filesystems.host_roots(own_root)) == (
        programs.Root(path=own_root),
    )
