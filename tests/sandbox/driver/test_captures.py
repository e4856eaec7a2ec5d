"""Captured GPUs as products: a replay behaves as its source."""

import json
import pathlib
from typing import Any

import pytest

from mig_manager.catalogue import hardware, product_table
from mig_manager.cli import main
from mig_manager.sandbox import node_spec
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs.node import nvml_rig
from tests.rigs.shell import commandline

A100 = "1xA100-SXM4-40GB"
MIG = tuple(p for p in nvml_rig.MIG_CAPABLE if not p.not_simulatable)


def shell(*line: str) -> commandline.Answer:
    return commandline.run(line, {}, command=main.main)


def capture(folder: pathlib.Path, spec: str, *, name: str = "captured.json") -> pathlib.Path:
    """Write a capture of simulated GPUs."""
    file, state = folder / name, folder / f"{name}.source"
    line = (
        "acceptance",
        "--simulate",
        spec,
        "--simulate-state",
        str(state),
        "--output-file",
        str(file),
    )
    assert shell(*line).status == 0
    return file


@pytest.mark.slow
def test_a_row_of_a_capture_is_the_product_of_its_source(tmp_path: pathlib.Path) -> None:
    rows: list[dict[str, Any]] = []
    for first in range(0, len(MIG), hardware.MAX_GPUS):
        spec = "+".join(product.key for product in MIG[first : first + hardware.MAX_GPUS])
        rows += node_spec.rows(capture(tmp_path, spec, name=f"{first}.json"))

    for product, row in zip(MIG, rows, strict=True):
        replayed = product_table.of_row(row)
        source = hardware.of_gpu(product.pci_device_ids[0], product.names[0], product.memory_mib)
        assert source is not None
        by_enum = sorted(product.profiles, key=lambda each: each.enum_index)
        assert replayed.profiles == tuple(by_enum), product.key
        for name in ("grid", "max_instances", "mode_needs_reset", "mode_persists", "generation"):
            assert getattr(replayed, name) == getattr(source, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["all-balanced", "all-1g.5gb", "all-disabled"])
def test_a_replayed_capture_gets_the_plan_and_order_of_its_source(
    tmp_path: pathlib.Path, layout: str
) -> None:
    file = capture(tmp_path, "2xA100-SXM4-40GB+A30" if layout != "all-1g.5gb" else A100)
    source = ("--simulate-state", f"{file}.source")
    replayed = ("--simulate", str(file), "--simulate-state", str(tmp_path / "replay"))

    plans = [shell("plan", layout, *gpus, "-o", "json").data for gpus in (source, replayed)]
    for gpus in (source, replayed):
        assert shell("apply", layout, *gpus).status == 0
    states_after = [shell("status", *gpus, "-o", "json").data for gpus in (source, replayed)]

    assert plans[0] == plans[1]
    assert states_after[0] == states_after[1]


def test_captured_durations_are_those_of_the_replay(tmp_path: pathlib.Path) -> None:
    file = capture(tmp_path, A100)
    data = json.loads(file.read_text("utf-8"))
    slow = {"function": "nvmlGpuInstanceDestroy", "calls": 9, "medianMs": 250, "longestMs": 300}
    data["latencies"] = [slow, *data["latencies"]]
    file.write_text(json.dumps(data), "utf-8")
    state = tmp_path / "replay"

    assert shell("status", "--simulate", str(file), "--simulate-state", str(state)).status == 0

    latency = nvml_faults.SharedState(state).read().options.latency
    assert latency.destroy_gpu_instance_s == 0.25
    assert latency.init_s > 0
    assert latency.create_gpu_instance_s == states.Latency().create_gpu_instance_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON: Expecting value"),
        ("{}", "is not a capture by 'mig-manager acceptance'"),
        ("[]", "is not a JSON object"),
        ('{"kind": "Status"}', "is not a capture by 'mig-manager acceptance'"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_capture_is_refused(
    tmp_path: pathlib.Path, text: str | None, message: str
) -> None:
    file = tmp_path / "captured.json"
    if text is not None:
        file.write_text(text, "utf-8")

    answer = shell("status", "--simulate", str(file), "--simulate-state", str(tmp_path / "state"))

    assert answer.status == 2
    assert message in answer.err


def test_a_changed_capture_needs_a_fresh_start(tmp_path: pathlib.Path) -> None:
    file = capture(tmp_path, A100)
    state = ("--simulate-state", str(tmp_path / "replay"))
    assert shell("status", "--simulate", str(file), *state).status == 0
    data = json.loads(file.read_text("utf-8"))
    (row,) = (row for row in data["gpus"][0]["profiles"] if row["name"] == "1g.5gb")
    row["placements"] = ["0:1"]
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(data), "utf-8")

    answer = shell("status", "--simulate", str(changed), *state)
    fresh = shell("status", "--simulate", str(changed), *state, "--fresh", "-o", "json")

    assert answer.status == 2
    assert "of another capture" in answer.err
    assert fresh.data["gpus"][0]["profiles"]["1g.5gb"] == ["0:1"]


@pytest.mark.slow
def test_a_command_prints_the_rows_of_a_capture_for_a_review(tmp_path: pathlib.Path) -> None:
    file = capture(tmp_path, "2xA100-SXM4-40GB+A30")

    answer = shell("acceptance", "--as-catalogue-row", str(file))

    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert [row["key"] for row in rows] == ["a100-sxm4-40gb", "a30"]
    assert all(row["sources"]["profiles"].startswith("capture by") for row in rows)
