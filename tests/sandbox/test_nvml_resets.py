"""Resets of simulated GPUs: by the driver itself, by the stand-in ``nvidia-smi``, by a reboot."""

import pathlib
import subprocess
import xml.etree.ElementTree as ET

import pynvml
import pytest

from mig_manager.sandbox.driver import nvidia_smi, states
from testkit import nvml_faults
from tests.sandbox import nvml_rig

FIRST, SECOND = "00000000:07:00.0", "00000000:0F:00.0"


def run_nvidia_smi(
    capsys: pytest.CaptureFixture[str], library: nvml_faults.CountingLibrary, *line: str
) -> tuple[int, str]:
    """Return the exit status and the output of ``nvidia-smi``."""
    status = nvidia_smi.main([str(library.state.path), *line])
    return status, capsys.readouterr().out


def gpus_in(text: str) -> list[ET.Element]:
    return ET.fromstring(text).findall("gpu")  # noqa: S314 - of our own making


def gpu(index: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def test_where_the_driver_cannot_reset_a_gpu_nvidia_smi_can(
    start: nvml_rig.Start, capsys: pytest.CaptureFixture[str]
) -> None:
    library = start(resets_itself=False)
    assert pynvml.nvmlDeviceSetMigMode(gpu(), 1) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [0, 1]

    assert run_nvidia_smi(capsys, library, "--gpu-reset", "-i", FIRST) == (
        0,
        f"GPU {FIRST} was successfully reset.\nAll done.\n",
    )
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [1, 1]


@pytest.mark.parametrize("name", ["0", FIRST, FIRST.lower(), FIRST.removeprefix("0000")])
def test_a_gpu_goes_by_index_or_address(
    name: str, start: nvml_rig.Start, capsys: pytest.CaptureFixture[str]
) -> None:
    library = start("2xA100")
    status, text = run_nvidia_smi(capsys, library, "-q", "-x", "-i", name)
    assert status == 0
    (element,) = gpus_in(text)
    assert element.findtext("uuid") == pynvml.nvmlDeviceGetUUID(gpu())


def test_xml_lists_what_is_on_a_gpu(
    start: nvml_rig.Start, capsys: pytest.CaptureFixture[str]
) -> None:
    library = start("A100+T4")
    device = nvml_rig.enabled()
    nvml_rig.filled(device)
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0))
    library.state.add_client(uuid, name="train", pid=4711)
    library.state.add_client(uuid, name="dcgm", kind=states.ClientKind.MONITOR)

    first, second = gpus_in(run_nvidia_smi(capsys, library, "-q", "-x")[1])

    assert first.findtext("mig_mode/current_mig") == "Enabled"
    assert [each.text for each in first.iterfind("mig_devices/mig_device/index")] == ["0"]
    assert [each.text for each in first.iterfind("processes/*/process_name")] == ["train"]
    assert second.findtext("mig_mode/pending_mig") == "N/A"
    assert second.findtext("mig_devices") == "None"


def test_a_gpu_in_use_is_not_reset_nor_those_named_with_it(
    start: nvml_rig.Start, capsys: pytest.CaptureFixture[str]
) -> None:
    library = start("2xA100")
    library.state.add_client(
        pynvml.nvmlDeviceGetUUID(gpu(1)), name="dcgm", kind=states.ClientKind.MONITOR
    )
    before = library.state.read()

    status, text = run_nvidia_smi(capsys, library, "--gpu-reset")

    assert status == 255
    assert f"could not be reset:\n  GPU {SECOND}: In use by another client\n\n1 device is" in text
    assert library.state.read() == before


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ({"virtualization": states.Virtualization.PASSTHROUGH}, 3, f"GPU {FIRST} is not supp"),
        ({"virtualization": states.Virtualization.VGPU}, 3, f"GPU {FIRST} is not supported."),
        ({"permitted": False}, 4, "Insufficient Permissions"),
        ({"linked_gpus": ((0, 1),)}, 3, SECOND),
    ],
)
def test_a_reset_is_refused_as_on_a_real_machine(
    options: dict[str, object],
    status: int,
    text: str,
    start: nvml_rig.Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = start("2xA100", **options)
    before = library.state.read()

    ended, output = run_nvidia_smi(capsys, library, "-r", "-i", FIRST)

    assert (ended, text in output) == (status, True)
    assert library.state.read() == before


def test_linked_gpus_are_reset_when_all_are_named(
    start: nvml_rig.Start, capsys: pytest.CaptureFixture[str]
) -> None:
    library = start("3xA100", linked_gpus=((0, 1),), serialise_all_gpus=True)
    assert run_nvidia_smi(capsys, library, "-r", "-i", f"{FIRST},{SECOND}")[0] == 0
    assert [each.attachments for each in library.state.read().gpus] == [1, 1, 0]


def test_an_unknown_gpu_and_a_missing_driver_have_their_own_statuses(
    tmp_path: pathlib.Path, start: nvml_rig.Start, capsys: pytest.CaptureFixture[str]
) -> None:
    library = start()
    assert run_nvidia_smi(capsys, library, "-r", "-i", "7") == (6, "No devices were found\n")
    assert nvidia_smi.main([str(tmp_path / "none"), "-q", "-x"]) == 9


def test_the_stand_in_is_a_program(tmp_path: pathlib.Path, start: nvml_rig.Start) -> None:
    library = start(resets_itself=False)
    pynvml.nvmlDeviceSetMigMode(gpu(), 1)
    program = nvidia_smi.install(tmp_path / "usr/bin", library.state.path)

    done = subprocess.run([program, "-r", "-i", "0"], check=True, capture_output=True, text=True)  # noqa: S603

    assert done.stdout.endswith("All done.\n")
    assert pynvml.nvmlDeviceGetMigMode(gpu()) == [1, 1]


def test_a_handle_and_a_minor_number_last_until_the_gpu_is_attached_again(
    start: nvml_rig.Start,
) -> None:
    library = start("2xA100", reattaches=True)
    first, second = gpu(0), gpu(1)
    minor = pynvml.nvmlDeviceGetMinorNumber(first)
    assert pynvml.nvmlDeviceSetMigMode(first, 1) == pynvml.NVML_SUCCESS

    assert nvml_rig.refusal(pynvml.nvmlDeviceGetMigMode, first) == "INVALID_ARGUMENT"
    assert pynvml.nvmlDeviceGetMigMode(second) == [0, 0]
    assert pynvml.nvmlDeviceGetMigMode(gpu(0)) == [1, 1]
    again = pynvml.nvmlDeviceGetMinorNumber(gpu(0))
    assert again not in (minor, pynvml.nvmlDeviceGetMinorNumber(second))
    assert library.state.reset_gpu(1) is states.Code.SUCCESS
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetUUID, second) == "INVALID_ARGUMENT"
