"""``apply`` as a process beside programs that use what it must destroy; on simulated GPUs."""

import json
import pathlib
import signal

import pytest

from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests import waiting
from tests.shell.shell_node import Node


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    """Two GPUs with 2g.10gb and 3g.20gb each."""
    return Node(tmp_path, "2xA100-SXM4-40GB", active="before")


def use(node: Node, profile: str, *, gpu: int = 1) -> states.Client:
    """Have a program use the MIG device of a profile."""
    answer = json.loads(node.run("status", "-o", "json").stdout)
    (device,) = (
        compute["uuid"]
        for instance in answer["gpus"][gpu]["gpu_instances"]
        for compute in instance["compute_instances"]
        if compute["profile"] == profile
    )
    return node.state.add_client(device, name="/usr/bin/train", pid=4242)


def test_it_is_refused_before_anything_is_destroyed_and_names_the_program(node: Node) -> None:
    use(node, "2g.10gb")
    before = node.shape
    node.state.log_calls()

    done = node.run("apply", "wanted")

    assert done.returncode == 1
    assert "GPU 1 (GPU-" in done.stderr
    assert "is in use by train (pid 4242, GPU instance " in done.stderr
    assert "nothing was changed" in done.stderr
    assert node.shape == before
    assert not node.journal.exists()
    called = {call.function for call in nvml_faults.read_calls(node.path)}
    assert called
    assert not {name for name in called if "Destroy" in name or "Create" in name}


@pytest.mark.slow
def test_a_program_on_an_instance_that_stays_is_in_nobodys_way(node: Node) -> None:
    use(node, "3g.20gb")

    assert node.run("apply", "wanted").returncode == 0


def test_wait_for_idle_waits_until_the_program_has_ended(node: Node) -> None:
    client = use(node, "2g.10gb")
    before = node.shape
    with node.started("apply", "wanted", "--wait-for-idle", "60") as process:
        assert process.stderr
        waits = next(line for line in process.stderr if "waiting up to 60 s" in line)
        assert "train (pid 4242" in waits
        assert node.shape == before
        node.state.remove_client(client)
        assert process.wait(60) == 0

    assert node.shape != before


@pytest.mark.slow
def test_wait_for_idle_is_given_up_at_its_end(node: Node) -> None:
    use(node, "2g.10gb")
    before = node.shape

    done = node.run("apply", "wanted", "--wait-for-idle", "0.1")

    assert done.returncode == 1
    assert "waited 0.1 s" in done.stderr
    assert node.shape == before


@pytest.mark.slow
def test_a_signal_ends_the_wait_at_once_and_nothing_was_changed(node: Node) -> None:
    use(node, "2g.10gb")
    before = node.shape
    with node.started("apply", "wanted", "--wait-for-idle", "600") as process:
        assert process.stderr
        next(line for line in process.stderr if "waiting up to 600 s" in line)
        process.send_signal(signal.SIGTERM)
        waiting.until(lambda: process.poll() is not None)

    assert process.returncode == -signal.SIGTERM
    assert node.shape == before
    assert not node.journal.exists()


@pytest.mark.slow
def test_a_mode_change_is_refused_while_a_program_uses_any_instance(node: Node) -> None:
    use(node, "3g.20gb", gpu=0)
    before = node.shape
    node.layouts.write_text(
        "version: v1\nmig-configs:\n  'off':\n  - {devices: all, mig-enabled: false}\n",
        encoding="utf-8",
    )

    done = node.run("apply", "off")

    assert done.returncode == 1
    assert "GPU 0 (GPU-" in done.stderr
    assert "is in use by train (pid 4242" in done.stderr
    assert node.shape == before
