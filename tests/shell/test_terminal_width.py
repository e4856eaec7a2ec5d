"""Answers at the widths of terminals: from COLUMNS, and in a real pseudo-terminal."""

import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

import pytest

from mig_manager.cli.toolkit import plan_table
from mig_manager.core.display import styles
from mig_manager.core.fleet import cluster_plan
from mig_manager.reasons import Reason
from tests.rigs.shell import commandline, plugin_rig
from tests.shell import terminal

_WIDTHS = (60, 80, 120, 200)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_H100 = ("--simulate", "2xH100-80GB-HBM3")
_ANSWERS = (
    ("status", *_H100),
    ("status", "-o", "wide", *_H100),
    ("plan", "all-disabled", "-o", "wide", *_H100),
    ("plan", "all-1g.10gb", "-o", "wide", *_H100),
    ("validate", *(word for name in ("H100-80GB-HBM3", "A30") for word in ("--gpu", name))),
    ("validate", "--gpu", "*"),
    ("doctor", "--simulate", "1xA30"),
)
_OF_THE_PLUGIN = (
    *(("status",), ("status", "gpu-1"), ("plan", "all-disabled"), ("capacity",), ("validate",)),
    *(("plan", "all-disabled", "gpu-1"), ("layouts", "gpu-1"), ("history", "gpu-1")),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The home of a user whose simulated GPUs have a layout."""
    home = tmp_path_factory.mktemp("home")
    assert commandline.Shell(home)("apply", "all-balanced", *_H100).status == 0
    return home


@pytest.fixture
def partitioned_shell(home: pathlib.Path) -> Iterator[commandline.Shell]:
    yield commandline.Shell(home)
    commandline.forget()


def assert_fits(run: Callable[..., commandline.Answer], argv: Sequence[str]) -> None:
    for columns in _WIDTHS:
        answer = run(*argv, COLUMNS=str(columns))
        assert answer.out
        for line in answer.out.splitlines():
            # A path, label or command stays whole: people copy it.
            assert len(line) <= columns or len(line.rsplit(maxsplit=1)[-1]) > 20, line


@pytest.mark.slow
@pytest.mark.parametrize("argv", _ANSWERS, ids=" ".join)
def test_answer_fits_the_terminal(
    partitioned_shell: commandline.Shell, argv: Sequence[str]
) -> None:
    assert_fits(partitioned_shell, argv)


@pytest.mark.slow
def test_paths_and_labels_are_never_broken(partitioned_shell: commandline.Shell) -> None:
    wide, narrow = (
        partitioned_shell("doctor", *_H100, COLUMNS=columns).out.split()
        for columns in ("500", "60")
    )
    assert sorted(narrow) == sorted(wide)


def test_quoted_commands_are_never_broken() -> None:
    command = "'kubectl label node gpu-node-1.example.org nvidia.com/mig.config=all-balanced'"
    sentence = f"The nodes' labels differ from the node's pods: run {command} and wait."
    style = styles.Style(columns=60)
    for text in (style.wrap(sentence), style.fit(sentence)):
        assert command in text
        assert text.count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("words", _OF_THE_PLUGIN, ids=" ".join)
def test_answer_of_the_plugin_fits_the_terminal(
    five_node_cluster: plugin_rig.KubectlUser, words: Sequence[str]
) -> None:
    assert_fits(five_node_cluster.run_plugin, words)


@pytest.mark.parametrize("columns", _WIDTHS)
def test_the_preview_of_a_rollout_fits_the_terminal(columns: int) -> None:
    pods = tuple(f"training/worker-{number}" for number in range(9))
    nodes = (
        cluster_plan.NodePlan(
            name="gpu-node-1.example.org",
            layout="all-balanced",
            fit=cluster_plan.NodeFit.FITS,
            claiming=pods,
        ),
        cluster_plan.NodePlan(
            name="b",
            layout="",
            fit=cluster_plan.NodeFit.DOES_NOT_FIT,
            reason=Reason.DOES_NOT_FIT,
            message="too small " * 20,
        ),
    )
    plan = cluster_plan.ClusterPlan(layout=None, source="x.yaml", nodes=nodes, pods_not_known="")

    shown = plan_table.table(plan, style=styles.Style(columns=columns))

    assert max(map(len, shown.splitlines())) <= columns
    assert "training/worker-0" in shown


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 200])
def test_answer_and_remedy_fit_a_real_terminal(tmp_path: pathlib.Path, columns: int) -> None:
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    missing = ["status", "--library-path", "/nonexistent.so"]
    out = terminal.run(["plan", "all-balanced", *_H100], columns=columns, environ=environ)
    error = terminal.run(missing, columns=columns, environ=environ, status=1)

    lines = [line.rstrip("\r") for line in _COLOUR.sub("", out + error).splitlines()]
    (border,) = (line for line in lines if "┌" in line)
    assert all(len(line) <= columns or str(tmp_path) in line for line in lines)
    assert len(border) > min(columns, 120) - 20
    assert "To try it without a GPU, add --simulate" in " ".join(error.split())


@pytest.mark.parametrize("columns", ["0", "", "-5", "wide"])
def test_an_unusable_width_is_ignored(shell: commandline.Shell, columns: str) -> None:
    argv = ("status", "--simulate", "1xA30")
    assert shell(*argv, COLUMNS=columns).out == shell(*argv).out


@pytest.mark.parametrize("command", ["", "apply", "rollout"])
def test_the_sentences_of_help_fit_a_narrow_terminal(
    shell: commandline.Shell, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    lines = shell(*filter(None, [command]), "--help").out.splitlines()

    # Examples stay whole: people copy them.
    wide = [line for line in lines if len(line) > 60]
    assert all(line.startswith("  mig-manager ") for line in wide), wide
    assert not [line for line in lines if re.search(r"\w-$", line)]  # names stay whole, too
