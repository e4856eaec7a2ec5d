"""``checkpoint`` and ``restore`` as processes, over a reboot and over kills; on simulated GPUs."""

import json
import pathlib
import signal

import pytest

from tests import waiting
from tests.shell.shell_node import Node

LAYOUTS = """
version: v1
mig-configs:
  then:
  - {devices: all, device-filter: "0x20B010DE", mig-enabled: true,
     mig-devices: {1c.3g.20gb: 1, 2c.3g.20gb: 1, 1g.5gb: 2}}
  - {devices: [0], device-filter: "0x233010DE", mig-enabled: true,
     mig-devices: {1g.20gb: 1, 1g.10gb: 2, 3g.40gb: 1}}
  - {devices: [1], device-filter: "0x233010DE", mig-enabled: true, mig-devices: {7g.80gb: 1}}
  now:
  - {devices: [0], mig-enabled: false}
  - {devices: [1], device-filter: "0x20B010DE", mig-enabled: true, mig-devices: {2g.10gb: 3}}
  - {devices: [1], device-filter: "0x233010DE", mig-enabled: true, mig-devices: {2g.20gb: 3}}
"""
SPECS = [pytest.param("2xA100-SXM4-40GB", marks=pytest.mark.slow), "2xH100-SXM5-80GB"]
CREATE = "nvmlDeviceCreateGpuInstance*"


class Kept:
    """A node with a checkpoint of a former layout."""

    def __init__(self, folder: pathlib.Path, spec: str) -> None:
        self.node = Node(folder, spec, layouts=LAYOUTS, active="then")
        self.file = folder / "checkpoint.json"
        self.shape = self.node.shape
        answer = self.node.run("checkpoint", "-f", str(self.file))
        assert (answer.returncode, answer.stdout) == (
            0,
            "MIG configuration checkpointed successfully\n",
        ), answer.stderr
        self.argv = ("restore", "-f", str(self.file))


@pytest.fixture
def kept(tmp_path: pathlib.Path) -> Kept:
    return Kept(tmp_path, "2xA100-SXM4-40GB")


@pytest.mark.parametrize("spec", SPECS)
def test_after_a_reboot_the_identical_placements_come_back(
    tmp_path: pathlib.Path, spec: str
) -> None:
    kept = Kept(tmp_path, spec)
    text = kept.file.read_bytes()
    kept.node.state.reboot()
    assert kept.node.shape != kept.shape

    restored = kept.node.run(*kept.argv)

    assert (restored.returncode, restored.stdout) == (
        0,
        "MIG configuration restored successfully\n",
    ), restored.stderr
    assert kept.node.shape == kept.shape
    kept.node.run("checkpoint", "-f", str(kept.file))
    assert kept.file.read_bytes() == text
    again = kept.node.run(*kept.argv)
    assert again.returncode == 0
    assert "nothing to do" in again.stderr


@pytest.mark.slow
def test_file_and_mode_can_come_from_mig_parteds_variables(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept.node.run("apply", "now").returncode == 0
    monkeypatch.setenv("MIG_PARTED_CHECKPOINT_FILE", str(kept.file))
    monkeypatch.setenv("MIG_PARTED_MODE_CHANGE_ONLY", "true")

    assert kept.node.run("restore").returncode == 0

    assert all(gpu.is_enabled for gpu in kept.node.state.read().gpus)
    assert kept.node.shape != kept.shape
    monkeypatch.delenv("MIG_PARTED_MODE_CHANGE_ONLY")
    assert kept.node.run("restore").returncode == 0
    assert kept.node.shape == kept.shape


@pytest.mark.slow
def test_a_checkpoint_written_by_mig_parted_is_restored(kept: Kept) -> None:
    uuid = json.loads(kept.file.read_text())["MigState"]["Devices"][0]["UUID"]
    # By hand, as its Go types are written out: of one GPU, with its own ids.
    kept.file.write_text(
        '{"Version":"v1","MigState":{"Devices":[{"UUID":"' + uuid + '","MigMode":1,'
        '"GpuInstances":[{"ProfileID":9,"Placement":{"Start":6,"Size":2},'
        '"ComputeInstances":[{"ProfileID":0,"EngProfileID":0}]},'
        '{"ProfileID":3,"Placement":{"Start":0,"Size":4},"ComputeInstances":'
        '[{"ProfileID":1,"EngProfileID":0},{"ProfileID":1,"EngProfileID":0}]}]}]}}'
    )
    neighbour = kept.node.shape[1]

    restored = kept.node.run(*kept.argv, "-o", "json")

    assert restored.returncode == 0, restored.stderr
    assert json.loads(restored.stdout)["is_changed"]
    exported = kept.node.run("status", "-o", "json").stdout
    first = json.loads(exported)["gpus"][0]
    assert {
        (gi["profile"], gi["placement"], tuple(ci["profile"] for ci in gi["compute_instances"]))
        for gi in first["gpu_instances"]
    } == {
        ("1g.10gb", "6:2", ("1g.10gb",)),
        ("4g.20gb", "0:4", ("2c.4g.20gb", "2c.4g.20gb")),
    }
    assert kept.node.shape[1] == neighbour


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"Version":"v1"', '"Version":"v3"', ":1:12: Version must be the text v1, not 'v3'"),
        ('"UUID":"GPU-', '"UUID":"GPU-not-', "is not on this node"),
        ('"Start":4', '"Start":5', "3g.20gb cannot be at 5:4"),
        ("]}}", "", ": not readable as YAML: "),
    ],
)
def test_a_bad_checkpoint_ends_with_status_2_and_its_place_and_changes_nothing(
    kept: Kept, old: str, new: str, message: str
) -> None:
    text = kept.file.read_text()
    assert old in text
    kept.file.write_text(text.replace(old, new, 1))
    assert kept.node.run("apply", "now").returncode == 0
    before = kept.node.shape

    answer = kept.node.run(*kept.argv)

    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"mig-manager: {kept.file}:" in answer.stderr
    assert message in answer.stderr
    assert "remedy: Restore a checkpoint of this node's GPUs" in answer.stderr
    assert kept.node.shape == before


@pytest.mark.slow
def test_a_signal_in_a_restore_waits_until_it_is_complete(kept: Kept) -> None:
    assert kept.node.run("apply", "now").returncode == 0
    kept.node.hang_in(CREATE)
    with kept.node.started(*kept.argv, "--gpu-timeout-s", "5", "--in-use-timeout-s", "1") as run:
        waiting.until(lambda: kept.node.is_hung)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=120)

    assert not kept.node.journal.exists() or kept.node.run(*kept.argv).returncode == 0


def test_a_checkpoint_replaces_a_file_as_a_whole_and_writes_into_a_pipe(kept: Kept) -> None:
    text = kept.file.read_text()
    kept.file.write_text("x" * 100_000)
    kept.file.chmod(0o640)
    link = kept.file.with_name("link.json")
    link.symlink_to(kept.file.name)

    assert kept.node.run("checkpoint", "-f", str(link)).returncode == 0
    piped = kept.node.run_process("checkpoint", "-f", "/dev/stdout")

    assert kept.file.read_text() == text
    assert link.is_symlink()
    assert kept.file.stat().st_mode & 0o777 == 0o640
    assert piped.stdout.startswith(text)


def test_a_checkpoint_that_cannot_be_written_says_so(kept: Kept) -> None:
    answer = kept.node.run("checkpoint", "-f", "/no/such/folder/c.json")

    assert (answer.returncode, answer.stdout) == (2, "")
    assert "cannot write /no/such/folder/c.json" in answer.stderr
