"""What ``acceptance`` finds: nothing on simulated GPUs, and every planted difference."""

import ast
import copy
import json
import pathlib
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_manager.adapters.nvml import survey
from mig_manager.catalogue import captured, hardware
from mig_manager.cli.acceptance import acceptance_report
from mig_manager.core import model, steps
from mig_manager.core.acceptance import surveys
from mig_manager.core.files import json_text
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.adapters.nvml import alterations
from tests.rigs.node import gpu_values, nvml_rig
from tests.rigs.node.nvml_rig import booted

ADAPTER = pathlib.Path(survey.__file__).parent
EVERY = tuple(p.key for p in hardware.products().values() if not p.not_simulatable)
TIMEOUT_S = 120.0


def report() -> Any:
    """Survey the node of this process."""
    return acceptance_report.report(survey.survey(None), timeout_s=TIMEOUT_S)


@pytest.fixture
def rig(tmp_path: pathlib.Path) -> Iterator[nvml_rig.NvmlRig]:
    """Return a node with two A100; the first has three instances."""
    with booted(tmp_path / "node", "2xA100-SXM4-40GB") as rig:
        rig.fill("3g.20gb", "2g.10gb", "1g.5gb")
        yield rig


def _filling(gpu: model.Gpu) -> Iterator[steps.Step]:
    row = max(gpu.profiles or (), key=lambda each: each.profile.gpu_slices)
    created = gpu_values.gi_step(gpu, str(row.profile))
    yield from (created, gpu_values.ci_step(created, str(row.profile)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(EVERY), 16))
@pytest.mark.parametrize("mode", model.MigMode)
def test_the_survey_finds_no_difference_on_a_simulated_product(
    tmp_path: pathlib.Path, first: int, mode: model.MigMode
) -> None:
    keys = EVERY[first : first + 16]
    with booted(tmp_path / "node", "+".join(keys)) as rig:
        gpus = [gpu for gpu in rig.gpus.observe() if gpu.is_mig_capable]
        if mode is model.MigMode.ENABLED:
            rig.execute(*(gpu_values.mode_step(gpu, mode) for gpu in gpus))
            rig.execute(*(step for gpu in gpus for step in _filling(gpu)))
        answer = report()

    assert answer["differences"] == []
    assert answer["verdict"] == "as-expected"
    assert len(answer["gpus"]) == len(keys)


@pytest.mark.slow
def test_every_function_of_the_adapter_is_called_or_explained(rig: nvml_rig.NvmlRig) -> None:
    used = {
        each.attr
        for path in ADAPTER.glob("*.py")
        for each in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(each, ast.Attribute)
        and each.attr.startswith("nvml")
        and isinstance(each.value, ast.Name)
        and each.value.id == "pynvml"
        and callable(getattr(pynvml, each.attr))
    }
    rig.state.add_client(rig.observe(1).uuid, name="trainer")

    answer = report()

    called = {each["function"] for each in answer["latencies"]}
    changes = {name for name, why in surveys.NOT_CALLED.items() if why == "changes the GPU"}
    assert used == called | set(answer["not_called"])
    assert changes <= set(answer["not_called"])
    assert all(each["median_ms"] >= 0 and each["calls"] for each in answer["latencies"])


@pytest.mark.slow
@given(seed=st.text(max_size=8))
@settings(max_examples=5, deadline=None)
def test_the_file_identifies_no_machine(tmp_path_factory: Any, seed: str) -> None:
    path = tmp_path_factory.mktemp("node") / "node"
    with booted(path, "2xA100-SXM4-40GB", options=states.Options(seed=seed)) as rig:
        rig.fill("3g.20gb", "1g.5gb")
        rig.state.add_client(rig.observe(1).uuid, name="/home/someone/secret-trainer")
        text = json.dumps(acceptance_report.report(survey.survey(None), timeout_s=TIMEOUT_S))
        gpus = rig.gpus.observe()
        secrets = {"secret-trainer", "someone"}
        for gpu, board in zip(gpus, rig.state.boards, strict=True):
            secrets |= {gpu.uuid, *gpu.mig_uuids, gpu.pci_address, str(board.serial_number)}

    lower = text.lower()
    assert not re.search(rf"\b{re.escape(platform.node().lower())}\b", lower)
    parts = {part for secret in secrets for part in (secret, secret.partition("-")[2])}
    assert not [part for part in parts if part and part.lower() in lower]


def test_a_name_with_a_uuid_in_it_is_cut() -> None:
    assert surveys.plain("Board 0123ABCD-0123-4567-89ab-0123456789ab") == "Board [removed]"


# -- planted differences ----------------------------------------------------------------------
#
# Each is planted in the driver; the catalogue stays as it is.


def _row(product: Any, name: str) -> Any:
    return next(row for row in product["profiles"] if row["name"] == name)


def _set(profile: str, **values: Any) -> Callable[[Any], None]:
    return lambda product: _row(product, profile).update(values)


PRODUCTS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "another profile id": (_set("2g.10gb", id=98), {"profile-id"}),
    "another profile name": (_set("4g.20gb", slices=5), {"slices", "profile-name"}),
    "less memory in a profile": (_set("3g.20gb", memory_mib=19456), {"profile-memory"}),
    "a placement less": (_set("3g.20gb", placements="0:4"), {"placement-missing"}),
    "a placement more": (_set("4g.20gb", placements="0:4 4:4"), {"placement-added"}),
    "another count": (_set("1g.5gb", max=6), {"instance-capacity"}),
    "another pack of compute instances": (
        lambda product: _row(product, "3g.20gb")["compute"].pop(1),
        {"compute-profiles"},
    ),
    "other media engines": (_set("2g.10gb", engines=[2, 2, 0, 0, 0]), {"engines"}),
    "fewer multiprocessors": (_set("1g.5gb", sms=12), {"multiprocessors"}),
    "a profile less": (lambda product: product["profiles"].pop(), {"profile-missing"}),
    "a profile more": (
        lambda product: product["profiles"].append(
            {**_row(product, "4g.20gb"), "enum": 13, "id": 47}
        ),
        {"profile-added"},
    ),
    "another product name": (lambda product: product.update(names=["NVIDIA A100"]), {"name"}),
    "another generation": (
        lambda product: product.update(architecture="hopper"),
        {"architecture"},
    ),
    "another memory": (
        lambda product: product.update(memory_total_mib=40536),
        {"memory"},
    ),
    "a mode change without a reset": (
        lambda product: product["mode"].update(needs_reset=False),
        {"mode-change"},
    ),
    "no MIG": (lambda product: product.update(mig_capable=False), {"mig"}),
}


@pytest.fixture(scope="module")
def subjects_by_product(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the subjects that are named for each GPU of a driver with other products."""
    folder = tmp_path_factory.mktemp("node")
    with booted(folder / "source"):
        (row,) = captured.rows(json_text.in_camel_case(report()))
    rows = [copy.deepcopy(row) for _ in PRODUCTS]
    for product, (plant, _) in zip(rows, PRODUCTS.values(), strict=True):
        plant(product)
    with booted(folder / "node", json.dumps(rows)) as rig:
        rig.fill("3g.20gb", index=[*PRODUCTS].index("another pack of compute instances"))
        answer = report()
    assert all(each["consequence"] for each in answer["differences"])
    return {
        name: {each["subject"] for each in answer["differences"] if each["gpu"] == number}
        for number, name in enumerate(PRODUCTS)
    }


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_planted_difference_is_the_only_one_named(
    subjects_by_product: dict[str, set[str]], name: str
) -> None:
    assert subjects_by_product[name] == PRODUCTS[name][1]


BEHAVIOUR = [
    (alterations.REVERSED_DEVICES, "rule", "MIG devices are in the order of their instances"),
    (alterations.OLD_MIG_UUIDS, "rule", "the UUIDs of MIG devices have NVIDIA's form"),
    (
        alterations.OTHER_INSTANCE_IDS,
        *("instance-id", "id of the GPU instance 3g.20gb at 0:4"),
    ),
]


@pytest.mark.parametrize(
    ("altered", "subject", "what"),
    [BEHAVIOUR[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in BEHAVIOUR[1:])],
)
def test_another_behaviour_of_the_driver_is_named(
    tmp_path: pathlib.Path,
    altered: dict[str, nvml_faults.Alteration],
    subject: str,
    what: str,
) -> None:
    with booted(tmp_path / "node", alterations=altered) as rig:
        rig.fill("3g.20gb", "2g.10gb", "1g.5gb")
        answer = report()

    assert (subject, what) in {(each["subject"], each["what"]) for each in answer["differences"]}


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (states.Options(reports_profiles_while_mig_off=False), "profiles-withheld"),
        (states.Options(fabric_state=2), "fabric"),
        (states.Options(fabric_state=4), "fabric"),
    ],
)
def test_another_setup_of_the_machine_is_named(
    tmp_path: pathlib.Path, options: states.Options, subject: str
) -> None:
    with booted(tmp_path / "node", options=options):
        answer = report()

    assert subject in {each["subject"] for each in answer["differences"]}


def test_a_registered_fabric_is_captured_but_not_a_difference(tmp_path: pathlib.Path) -> None:
    with booted(tmp_path / "node", options=states.Options(fabric_state=3)):
        answer = report()

    assert answer["differences"] == []
    fabric = answer["gpus"][0]["fabric"]
    assert fabric["state"] == "completed"
    assert "do not use NVLink" in fabric["consequence"]


ANSWERS = [
    ("nvmlDeviceGetGpuInstanceById", 2, "answer", "changes"),
    ("nvmlDeviceGetVirtualizationMode", 3, "function", "none"),
    ("nvmlDeviceGetMigDeviceHandleByIndex*", 999, "unreachable", "changes"),
    ("nvmlDeviceGetArchitecture", 3, "architecture", "changes"),
    ("nvmlDeviceGetMigMode", 3, "mig", "changes"),
    ("nvmlDeviceGetFieldValues", 3, "function", "none"),
    ("nvmlDeviceRegisterEvents", 3, "function", "none"),
    ("nvmlDeviceGetHandleByPciBusId*", 6, "rule", "changes"),
    ("nvmlDeviceGetHandleByIndex*", 15, "unreachable", "changes"),
]


@pytest.mark.parametrize(
    ("function", "code", "subject", "effect"),
    [*ANSWERS[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in ANSWERS[2:])],
)
def test_another_answer_of_the_driver_is_named(
    rig: nvml_rig.NvmlRig, function: str, code: int, subject: str, effect: str
) -> None:
    rig.fault(function, code=code, count=None)

    answer = report()

    assert (subject, effect) in {(e["subject"], e["effect"]) for e in answer["differences"]}
    assert answer["verdict"] == ("review" if effect == "changes" else "differs")


def test_an_unknown_product_is_named(tmp_path: pathlib.Path) -> None:
    with booted(tmp_path / "source"):
        (row,) = captured.rows(json_text.in_camel_case(report()))
    with booted(tmp_path / "node", json.dumps([{**row, "pci": ["0x12345678"]}])):
        (difference,) = report()["differences"]

    assert (difference["subject"], difference["effect"]) == ("product", "simulation")
    assert "Send the file" in difference["consequence"]
