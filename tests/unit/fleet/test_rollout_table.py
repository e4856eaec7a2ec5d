"""The live table of a rollout."""

import dataclasses

from mig_manager.cli.rollout import rollout_report
from mig_manager.core.display import styles
from tests.unit.fleet.rollouts import busy_node, decide, done_node


def test_the_live_table_lists_a_node_with_unreachable_gpus() -> None:
    whole = done_node("b").status
    assert whole
    partial = dataclasses.replace(whole, unreachable=("GPU 3",))
    decision = decide(done_node("a"), done_node("b", status=partial))

    text = rollout_report.table(decision, "title", style=styles.Style(), size=(100, 24))

    assert [line.split()[0] for line in text.splitlines()] == ["title:", "b"]
    assert "without unreachable GPU 3" in text


def test_the_live_table_marks_where_it_cuts_a_line() -> None:
    name = "ip-10-0-12-34.eu-central-1.compute.internal"
    decision = decide(busy_node(name))

    wide, narrow = (
        rollout_report.table(
            decision, "title", style=styles.Style(), size=(columns, 24)
        ).splitlines()
        for columns in (120, 44)
    )

    assert "…" not in "".join(wide)
    assert name in wide[1]
    assert [(len(line), line[-1]) for line in narrow] == [(43, "…")] * 2
    assert "ip-10-0-12-34.eu-cent…  pending" in narrow[1]
