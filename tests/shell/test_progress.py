"""The line that shows how far a change of the GPUs is."""

import io
import os
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager.adapters.host import line_writer
from mig_manager.cli import progress
from mig_manager.core import model, steps
from tests.rigs.shell.shell_node import ShellNode
from tests.shell import terminal

_FRAME = re.compile(r"\r\x1b\[K([^\r\n]*)")
_STEP = steps.SetMode(gpu_uuid="GPU-0", mode=model.MigMode.ENABLED, needs_reset=False)


def shown_by(node: ShellNode, *argv: str) -> list[str]:
    """Return what stood in the line, one after the other, each as it was erased by the next."""
    written = terminal.run(node.arguments(*argv), columns=80, environ=dict(os.environ))
    return _FRAME.findall(written)


@pytest.mark.slow
def test_apply_shows_each_step_and_leaves_no_line_of_it(pair: ShellNode) -> None:

    frames = shown_by(pair, "apply", "requested")

    counted = [frame for frame in frames if " of " in frame]
    total = int(counted[0].split()[2])
    assert [int(frame.split()[0]) for frame in counted] == list(range(total + 1))
    assert " of " not in frames[-1]
    assert max(map(len, frames)) < 80


@pytest.mark.slow
def test_restore_shows_its_steps(node: ShellNode, tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "checkpoint.json")
    assert node.run("checkpoint", "-f", file).status == 0
    assert node.run("apply", "requested").status == 0

    assert any("GPU 0 1/" in frame for frame in shown_by(node, "restore", "-f", file))


@pytest.mark.slow
def test_a_pipe_gets_no_progress(node: ShellNode) -> None:
    answer = node.run_process("apply", "requested")

    assert answer.status == 0
    assert "\x1b" not in answer.err
    assert " of " not in answer.err


@pytest.mark.slow
def test_a_terminal_that_cannot_erase_gets_no_progress(node: ShellNode) -> None:
    environ = {**os.environ, "TERM": "dumb"}

    written = terminal.run(node.arguments("apply", "requested"), columns=80, environ=environ)

    assert "applied successfully" in written
    assert "\x1b" not in written
    assert " of " not in written


@given(
    columns=st.integers(1, 250),
    totals=st.lists(st.integers(1, 40), max_size=16),
    done=st.lists(st.integers(0, 15), max_size=40),
)
def test_the_line_is_shorter_than_any_terminal(
    columns: int, totals: list[int], done: list[int]
) -> None:
    shown = progress.Progress(line_writer.LineWriter(io.StringIO()), columns)
    plans = (
        steps.GpuPlan(gpu_uuid=f"GPU-{i}", gpu_index=i, steps=(_STEP,) * total, target=())
        for i, total in enumerate(totals)
    )
    shown.steps_began(steps.Plan(gpus=tuple(plans)))
    for index in done:
        if index < len(totals):
            shown.step_ended(index)

        assert len(shown.line) < columns


def test_a_remark_replaces_the_line_shown() -> None:
    stream = io.StringIO()
    remarks = line_writer.LineWriter(stream)

    remarks.show("1 of 2 steps")
    remarks.put("warning")
    remarks.put("another")

    assert stream.getvalue() == "\r\x1b[K1 of 2 steps\r\x1b[Kwarning\nanother\n"
