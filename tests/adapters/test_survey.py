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

from mig_manager.adapters.nvml import survey as nvml_survey
from mig_manager.catalogue import hardware
from mig_manager.cli.commands import acceptance
from mig_manager.core import model, steps
from mig_manager.core.acceptance import differences, survey
from mig_manager.sandbox import twin
from mig_manager.sandbox.driver import states
from tests import nvml_rig
from tests.nvml_rig import rig

ADAPTER = pathlib.Path(nvml_survey.__file__).parent
EVERY = tuple(p.key for p in hardware.products().values() if not p.not_simulatable)
TIMEOUT_S = 120.0


def report() -> Any:
    """Survey the node of this process."""
    return acceptance.report(nvml_survey.survey(None), timeout_s=TIMEOUT_S)


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[nvml_rig.Rig]:
    """Return a node with two A100; the first has three instances."""
    with rig(tmp_path / "node", "2xA100-SXM4-40GB") as found:
        found.fill("3g.20gb", "2g.10gb", "1g.5gb")
        yield found


def _filling(gpu: model.Gpu) -> Iterator[steps.Step]:
    row = max(gpu.profiles or (), key=lambda each: each.profile.gpu_slices)
    created = nvml_rig.gi_step(gpu, str(row.profile))
    yield from (created, nvml_rig.ci_step(created, str(row.profile)))


@pytest.mark.parametrize("first", range(0, len(EVERY), 16))
@pytest.mark.parametrize("mode", model.MigMode)
def test_no_product_differs(tmp_path: pathlib.Path, first: int, mode: model.MigMode) -> None:
    keys = EVERY[first : first + 16]
    with rig(tmp_path / "node", "+".join(keys)) as found:
        gpus = [gpu for gpu in found.gpus.observe() if gpu.is_mig_capable]
        if mode is model.MigMode.ENABLED:
            found.run(*(nvml_rig.mode_step(gpu, mode) for gpu in gpus))
            found.run(*(step for gpu in gpus for step in _filling(gpu)))
        answer = report()

    assert answer["differences"] == []
    assert answer["verdict"] == "as-expected"
    assert len(answer["gpus"]) == len(keys)


def test_every_function_of_the_adapter_is_called_or_explained(node: nvml_rig.Rig) -> None:
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
    node.state.add_client(node.observe(1).uuid, name="trainer")

    answer = report()

    called = {each["function"] for each in answer["latencies"]}
    changes = {name for name, why in survey.NOT_CALLED.items() if why == "changes the GPU"}
    assert used == called | set(answer["not_called"])
    assert changes <= set(answer["not_called"])
    assert all(each["median_ms"] >= 0 and each["calls"] for each in answer["latencies"])


@given(seed=st.text(max_size=8))
@settings(max_examples=5, deadline=None)
def test_the_file_identifies_no_machine(tmp_path_factory: Any, seed: str) -> None:
    path = tmp_path_factory.mktemp("node") / "node"
    with rig(path, "2xA100-SXM4-40GB", options=states.Options(seed=seed)) as found:
        found.fill("3g.20gb", "1g.5gb")
        found.state.add_client(found.observe(1).uuid, name="/home/someone/secret-trainer")
        text = json.dumps(acceptance.report(nvml_survey.survey(None), timeout_s=TIMEOUT_S))
        gpus = found.gpus.observe()
        secrets = {"secret-trainer", "someone"}
        for gpu, board in zip(gpus, found.state.boards, strict=True):
            secrets |= {gpu.uuid, *gpu.mig_uuids, gpu.pci_address, str(board.serial_number)}

    lower = text.lower()
    assert not re.search(rf"\b{re.escape(platform.node().lower())}\b", lower)
    parts = {part for secret in secrets for part in (secret, secret.partition("-")[2])}
    assert not [part for part in parts if part and part.lower() in lower]


def test_a_name_with_a_uuid_in_it_is_cut() -> None:
    assert survey.plain("Board 0123ABCD-0123-4567-89ab-0123456789ab") == "Board [removed]"


def _row(gpu: Any, name: str) -> Any:
    return next(row for row in gpu["profiles"] if row["name"] == name)


def _set(profile: str, **values: Any) -> Callable[[Any], None]:
    return lambda gpu: _row(gpu, profile).update(values)


PLANTED: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "another profile id": (_set("2g.10gb", id=98), "profile-id", "none"),
    "another attribute": (_set("1g.5gb+me", name="1g.5gb+gfx"), "profile-name", "simulation"),
    "fewer slices": (_set("4g.20gb", slices=3), "slices", "simulation"),
    "less memory in a profile": (_set("3g.20gb", memory_mib=19000), "profile-memory", "none"),
    "a placement less": (_set("3g.20gb", placements=["0:4"]), "placement-missing", "simulation"),
    "a placement more": (
        _set("4g.20gb", placements=["0:4", "4:4"]),
        *("placement-added", "simulation"),
    ),
    "another capacity": (_set("1g.5gb", max_instances=6), "instance-capacity", "none"),
    "another compute profile": (
        lambda gpu: _row(gpu, "3g.20gb")["compute_profiles"].pop(),
        *("compute-profiles", "changes"),
    ),
    "more decoders": (_set("1g.5gb", engines=[1, 2, 0, 0, 0]), "engines", "simulation"),
    "fewer multiprocessors": (_set("1g.5gb", multiprocessors=12), "multiprocessors", "none"),
    "a profile less": (lambda gpu: gpu["profiles"].pop(), "profile-missing", "simulation"),
    "a profile more": (
        lambda gpu: gpu["profiles"].append({**gpu["profiles"][0], "enum": 15, "name": "1g.5gb+x"}),
        *("profile-added", "simulation"),
    ),
    "profiles withheld": (lambda gpu: gpu.update(profiles=None), "profiles-withheld", "changes"),
    "another name": (lambda gpu: gpu.update(name="NVIDIA A100"), "name", "simulation"),
    "another generation": (
        lambda gpu: gpu.update(architecture="hopper"),
        *("architecture", "changes"),
    ),
    "another memory": (lambda gpu: gpu.update(memory_mib=40536), "memory", "none"),
    "a mode change without a reset": (
        lambda gpu: gpu.update(mode_change_needs_reset=False),
        *("mode-change", "simulation"),
    ),
    "no MIG": (lambda gpu: gpu.update(mig_mode=None), "mig", "changes"),
    "another instance id": (
        lambda gpu: gpu["instances"][0].update(id=12),
        *("instance-id", "none"),
    ),
    "another order of MIG devices": (
        lambda gpu: gpu["rules"].update(
            {"MIG devices are in the order of their instances": False}
        ),
        *("rule", "none"),
    ),
    "a broken UUID rule": (
        lambda gpu: gpu["rules"].update({"no two GPUs have the same UUID": False}),
        *("rule", "changes"),
    ),
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return the capture of a divided GPU, and what is expected of it."""
    with rig(tmp_path_factory.mktemp("node") / "node") as found:
        found.fill("3g.20gb", "2g.10gb", "1g.5gb")
        captured = survey.capture(nvml_survey.survey(None))
    return captured[0], twin.of(captured, timeout_s=TIMEOUT_S).gpus[0]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_the_only_one_named(compared: tuple[Any, Any], name: str) -> None:
    plant, subject, effect = PLANTED[name]
    captured, expected = compared
    planted = copy.deepcopy(captured)
    plant(planted)
    product = twin.product_of(captured)
    assert product is not None

    def ids(placement: model.Placement) -> frozenset[int]:
        return twin.instance_ids(product, placement)

    (found,) = differences.of_gpu(0, planted, expected, instance_ids=ids)

    assert (found.subject.value, found.effect.value) == (subject, effect)
    assert found.consequence
    assert found.expected != found.actual


ANSWERS = [
    ("nvmlDeviceGetGpuInstanceById", 2, "answer", "changes"),
    ("nvmlDeviceGetMigDeviceHandleByIndex*", 999, "unreachable", "changes"),
    ("nvmlDeviceGetArchitecture", 3, "architecture", "changes"),
    ("nvmlDeviceGetVirtualizationMode", 3, "function", "none"),
    ("nvmlDeviceGetMigMode", 3, "mig", "changes"),
    ("nvmlDeviceGetFieldValues", 3, "function", "none"),
    ("nvmlDeviceRegisterEvents", 3, "function", "none"),
    ("nvmlDeviceGetHandleByPciBusId*", 6, "rule", "changes"),
    ("nvmlDeviceGetHandleByIndex*", 15, "unreachable", "changes"),
]


@pytest.mark.parametrize(("function", "code", "subject", "effect"), ANSWERS)
def test_another_answer_of_the_driver_is_named(
    node: nvml_rig.Rig, function: str, code: int, subject: str, effect: str
) -> None:
    node.fault(function, code=code, count=None)

    answer = report()

    assert (subject, effect) in {(e["subject"], e["effect"]) for e in answer["differences"]}
    assert answer["verdict"] == ("review" if effect == "changes" else "differs")


def test_an_unknown_product_is_named(compared: tuple[Any, Any]) -> None:
    unknown: Any = {**compared[0], "pci_device_id": "0x12345678"}

    assert twin.of([unknown], timeout_s=TIMEOUT_S).gpus == (None,)
    (found,) = differences.of_gpu(0, unknown, None)
    assert (found.subject.value, found.effect.value) == ("product", "simulation")
    assert "Send the file" in found.consequence
