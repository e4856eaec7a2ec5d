"""The adapter and ``doctor`` on real GPUs: they change nothing, so the GPUs may be in use."""

import re

import pynvml
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters import host
from mig_manager.adapters.nvml import events, nvml_gpus, worker_client
from mig_manager.cli import registry
from mig_manager.cli.acceptance import acceptance_report
from mig_manager.cli.doctor import doctor_facts, doctor_report, doctor_settings, examination
from mig_manager.cli.toolkit import parser
from mig_manager.core import model, steps

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> tuple[model.Gpu, ...]:
    try:
        return nvml_gpus.NvmlGpus(clock=host.SystemClock()).observe()
    except errors.HardwareError as error:
        if error.reason is reasons.Reason.DRIVER_NOT_LOADED:
            pytest.skip(f"no NVIDIA driver here: {error.message}")
        raise


def test_every_gpu_has_its_identity(gpus: tuple[model.Gpu, ...]) -> None:
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    for gpu in gpus:
        assert re.fullmatch(r"GPU-[0-9a-f-]{36}", gpu.uuid)
        assert re.fullmatch(r"[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", gpu.pci_address)
        assert gpu.pci_device_id & 0xFFFF == 0x10DE
        assert gpu.name


def test_every_profile_has_a_name_and_a_placement(gpus: tuple[model.Gpu, ...]) -> None:
    rows = [row for gpu in gpus for row in gpu.profiles or ()]
    if not rows:
        pytest.skip("no GPU here reports MIG profiles")
    for row in rows:
        assert row.placements
        assert row.profile.spans
        assert not any(name.startswith("enum") for name in row.profile.attributes)
    for gpu in gpus:
        names = [row.profile for row in gpu.profiles or ()]
        assert len(names) == len(set(names))


def test_instances_are_at_placements_of_their_profile(gpus: tuple[model.Gpu, ...]) -> None:
    for gpu in gpus:
        placements = {row.profile_id: row.placements for row in gpu.profiles or ()}
        for instance in gpu.gpu_instances:
            assert instance.placement in placements[instance.profile_id]
            for compute in instance.compute_instances:
                assert compute.uuid is not None
                assert compute.uuid.startswith("MIG-")


def test_a_second_observation_and_one_by_a_worker_are_equal(gpus: tuple[model.Gpu, ...]) -> None:
    assert nvml_gpus.NvmlGpus(clock=host.SystemClock()).observe() == gpus
    child = worker_client.WorkerGpus(command=worker_client.worker_command(), timeout_s=60.0)
    assert child.observe() == gpus


def test_acceptance_observes_every_gpu_without_a_difference_for_layouts(
    gpus: tuple[model.Gpu, ...],
) -> None:
    answer = acceptance_report.report(
        worker_client.WorkerGpus(command=worker_client.worker_command(), timeout_s=60.0).survey(),
        timeout_s=60.0,
    )
    assert [each["name"] for each in answer["gpus"]] == [gpu.name for gpu in gpus]
    assert [each for each in answer["differences"] if each["effect"] == "changes"] == []


def test_every_gpu_with_mig_reports_whether_it_has_events(gpus: tuple[model.Gpu, ...]) -> None:
    capable = [gpu for gpu in gpus if gpu.current_mode is not None]
    try:
        with events.listening(None) as changes:
            types = {
                gpu.uuid: pynvml.nvmlDeviceGetSupportedEventTypes(
                    pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                )
                for gpu in gpus
            }
            heard = set(changes.gpus)
            # No program should be changing them now; an event is about one of them all the same.
            event = changes.wait(0.0)
            assert event is None or event.uuid in heard
    except errors.HardwareError as error:
        assert error.reason is reasons.Reason.NOT_SUPPORTED  # noqa: PT017 - the one good refusal
        pytest.skip(f"this driver does not report MIG changes: {error.message}")
    supported = {uuid for uuid, mask in types.items() if mask & pynvml.nvmlEventMigConfigChange}
    assert heard <= {gpu.uuid for gpu in capable}
    assert heard == supported & {gpu.uuid for gpu in capable}


@pytest.mark.usefixtures("gpus")
def test_an_empty_plan_is_allowed() -> None:
    nvml_gpus.NvmlGpus(clock=host.SystemClock()).execute(steps.Plan(gpus=()))


def test_doctor_checks_every_gpu_without_an_internal_error() -> None:
    settings = doctor_settings.DoctorSettings.read(
        parser.parse(registry.PROGRAM, ["doctor", "--timeout-s", "60"]), {}
    )

    report = examination.examine(
        examination.CHECKS, doctor_facts.facts(settings), timeout_s=settings.timeout_s
    )

    findings = dict(report.findings)
    if findings["driver"].result is doctor_report.CheckResult.FAIL:
        pytest.skip(f"no NVIDIA driver here: {findings['driver'].text}")
    assert set(findings) == {check.name for check in examination.CHECKS}
    assert not [each for _, each in report.findings if "the check failed" in each.text]
    assert findings["gpu-processes"].result is not doctor_report.CheckResult.SKIPPED
