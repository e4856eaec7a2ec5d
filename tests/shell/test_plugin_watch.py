"""``kubectl mig status --watch``, with the real kubectl."""

import subprocess
import sys

from tests.shell import plugin_rig as rig
from tests.shell import terminal

_MODULE = "mig_manager.kubectl"


def test_a_node_is_drawn_with_what_happened_in_its_last_run_until_q(viewer: rig.Viewer) -> None:
    argv = ["status", "gpu-1", "--watch"]
    with terminal.started(
        argv, columns=100, environ=viewer.environment, module=_MODULE
    ) as session:
        session.read_until(r"GPU 0-7[\s\S]*WHAT[\s\S]*started[\s\S]*q quits")
        session.type("q")

        assert session.end() == 0


def test_many_nodes_stay_a_line_each(viewer: rig.Viewer) -> None:
    with terminal.started(
        ["status", "-w"], columns=120, environ=viewer.environment, module=_MODULE
    ) as session:
        session.read_until(r"NODE[\s\S]*gpu-1[\s\S]*gpu-2[\s\S]*q quits")
        session.type("q")

        assert session.end() == 0


def test_a_pipe_gets_a_line_for_each_node_that_changes(viewer: rig.Viewer) -> None:
    command = [sys.executable, "-m", _MODULE, "status", "-w", "gpu-1", "gpu-2"]
    with subprocess.Popen(  # noqa: S603 - our own program
        command, env=viewer.environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(2)]
        viewer.kubectl("label", "node", "gpu-1", "nvidia.com/mig.config=other", "--overwrite")

        changed = process.stdout.readline()
        process.kill()
        viewer.kubectl(
            "label", "node", "gpu-1", "nvidia.com/mig.config=all-balanced", "--overwrite"
        )

    assert "gpu-1, applied, Applied, requested all-balanced" in first[0]
    assert "gpu-1, waiting, Applied, requested other, applied all-balanced" in changed


def test_data_is_not_watched(viewer: rig.Viewer) -> None:
    answer = viewer.alone("status", "-w", "-o", "json")

    assert answer.status == 2
    assert "--watch shows text" in answer.err
