"""``checkpoint`` and ``restore`` as processes, over a reboot; on simulated GPUs."""

import pathlib

import pytest

from tests.rigs.shell.shell_node import ShellNode

LAYOUTS = """
version: v1
mig-configs:
  then:
  - {devices: all, device-filter: "0x20B010DE", mig-enabled: true,
     mig-devices: {1c.3g.20gb: 1, 2c.3g.20gb: 1, 1g.5gb: 2}}
  - {devices: [0], device-filter: "0x233010DE", mig-enabled: true,
     mig-devices: {1g.20gb: 1, 1g.10gb: 2, 3g.40gb: 1}}
  - {devices: [1], device-filter: "0x233010DE", mig-enabled: true, mig-devices: {7g.80gb: 1}}
"""


class CheckpointedNode(ShellNode):
    """A node with a checkpoint of a former layout."""

    def __init__(self, folder: pathlib.Path, spec: str) -> None:
        super().__init__(folder, spec, layouts=LAYOUTS, active="then")
        self.file = folder / "checkpoint.json"
        self.before = self.geometry
        answer = self.run("checkpoint", "-f", str(self.file))
        assert (answer.status, answer.out) == (
            0,
            "MIG configuration checkpointed successfully\n",
        ), answer.err
        self.argv = ("restore", "-f", str(self.file))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["2xA100-SXM4-40GB", "2xH100-SXM5-80GB"])
def test_after_a_reboot_the_identical_placements_come_back(
    tmp_path: pathlib.Path, spec: str
) -> None:
    node = CheckpointedNode(tmp_path, spec)
    text = node.file.read_bytes()
    node.state.reboot()
    assert node.geometry != node.before

    restored = node.run(*node.argv)

    assert (restored.status, restored.out) == (
        0,
        "MIG configuration restored successfully\n",
    ), restored.err
    assert node.geometry == node.before
    node.run("checkpoint", "-f", str(node.file))
    assert node.file.read_bytes() == text
    again = node.run(*node.argv)
    assert again.status == 0
    assert "nothing to do" in again.err


@pytest.mark.slow
def test_a_checkpoint_replaces_a_file_as_a_whole_and_writes_into_a_pipe(
    tmp_path: pathlib.Path,
) -> None:
    node = CheckpointedNode(tmp_path, "2xA100-SXM4-40GB")
    text = node.file.read_text()
    node.file.write_text("x" * 100_000)
    node.file.chmod(0o640)
    link = node.file.with_name("link.json")
    link.symlink_to(node.file.name)
    names = sorted(node.file.parent.iterdir())

    assert node.run("checkpoint", "-f", str(link)).status == 0
    piped = node.run_process("checkpoint", "-f", "/dev/stdout")

    assert node.file.read_text() == text
    assert link.is_symlink()
    assert node.file.stat().st_mode & 0o777 == 0o640
    assert sorted(node.file.parent.iterdir()) == names
    assert piped.out.startswith(text)
