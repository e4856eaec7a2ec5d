"""Pictures and tables at the widths of terminals."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.display import picture, styles, tables
from mig_manager.core.planner import planner
from tests.rigs.node import samples
from tests.unit import drawn_gpus

_DOWN, _UP = set("│┼┬┌┐├┤"), set("│┼┴└┘├┤")
_BORDER = set("─┼┴┬┌┐└┘├┤")
WIDTHS = st.one_of(st.sampled_from((60, 80, 120, 200)), st.integers(60, 220))


def pictures(gpu: model.Gpu, columns: int) -> str:
    """Return a GPU as it is, and on its way to two other states."""
    style = styles.Style(columns=columns)
    blocks = [picture.draw_gpus([gpu], style=style)]
    smallest = str((gpu.profiles or ())[0].profile)
    for desired in (
        samples.desired_gpu({smallest: 1}),
        samples.desired_gpu(mode=model.MigMode.DISABLED),
    ):
        plan = planner.plan([gpu], {gpu.uuid: desired})
        blocks.append(picture.draw_change([gpu], plan, selected={gpu.uuid}, style=style))
    return "\n".join(blocks)


@hypothesis.given(
    gpu=st.sampled_from(sorted(samples.PRODUCTS)).flatmap(drawn_gpus.gpus), columns=WIDTHS
)
def test_every_picture_fits_the_terminal_and_its_borders_meet(
    gpu: model.Gpu, columns: int
) -> None:
    lines = pictures(gpu, columns).splitlines()

    assert max(map(len, lines)) <= columns
    for above, below in itertools.pairwise(lines):
        for upper, lower in itertools.zip_longest(above, below, fillvalue=" "):
            # A mark, such as "destroy", stands over the outer border.
            if upper in _BORDER | {"│"} and lower in _BORDER | {"│"}:
                assert (upper in _DOWN) == (lower in _UP), f"{above}\n{below}"


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_slices_are_to_scale_at_every_width(columns: int) -> None:
    gpu = samples.gpu(samples.H100, "1g.10gb@0", "1g.10gb@1", "2g.20gb@2", "3g.40gb@4")

    border = picture.draw_gpus([gpu], style=styles.Style(columns=columns)).splitlines()[1]

    small, same, double, *four = (len(cell) + 1 for cell in border.strip(" ┌┐").split("┬"))
    assert (same, double, four) == (small, 2 * small, [4 * small])


def test_a_narrow_slice_drops_the_memory_from_its_title_and_keeps_its_mark() -> None:
    shown = pictures(samples.gpu(samples.H100, "1g.10gb+me@0", "2g.20gb@2"), 60)

    assert "│ 1g+me " in shown or "│1g+me│" in shown
    assert "│  2g.20gb  │" in shown
    assert "destroy" in shown


def test_a_narrow_slice_that_nothing_fits_has_a_whole_word_as_its_label() -> None:
    assert "│none│" in pictures(samples.gpu(samples.A100, "1g.5gb@6"), 60).replace(" ", "")


def test_a_picture_without_a_terminal_is_100_columns_wide() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4")
    at_100 = picture.draw_gpus([gpu], style=styles.Style(columns=100))
    assert picture.draw_gpus([gpu], style=styles.Style()) == at_100


_WORDS = st.text("abc -,:", min_size=1, max_size=70).map(str.strip).filter(bool)


@hypothesis.given(
    rows=st.lists(st.lists(_WORDS, min_size=5, max_size=5), max_size=4), columns=WIDTHS
)
def test_a_table_fits_the_terminal_and_loses_no_character(
    rows: list[list[str]], columns: int
) -> None:
    head = ("NODE", "STATE", "REASON", "AGE", "SLICES")

    lines = tables.columns(head, rows, style=styles.Style(columns=columns))

    assert max(map(len, lines)) <= columns
    shown, expected = "".join(lines), "".join(map("".join, [head, *rows]))
    assert sorted(shown.replace(" ", "")) == sorted(expected.replace(" ", ""))


@pytest.mark.parametrize(("columns", "fold"), [(80, 4), (120, 6)])
def test_a_table_of_long_names_stays_a_table(columns: int, fold: int) -> None:
    head = ("NODE", "STATE", "REASON", "AGE", "REQUESTED", "APPLIED", "SLICES")
    facts = ("success", "AlreadyApplied", "5m", *2 * ["all-balanced"], "16x 1g.10gb, 8x 2g.20gb")
    rows = [(f"ip-10-0-12-{n}.eu-central-1.compute.internal", *facts) for n in range(10, 50)]

    lines = tables.columns(head, rows, style=styles.Style(columns=columns))

    assert len(lines) == 2 * 41
    for first, second, cells in zip(lines[::2], lines[1::2], [head, *rows], strict=True):
        assert first.split() == list(cells[:fold])
        assert second.split(maxsplit=6 - fold) == list(cells[fold:])
        assert first.index(cells[1]) == lines[0].index("STATE")
        assert second.index(cells[-1]) == lines[1].index("SLICES")
    assert max(map(len, lines)) <= columns


def test_table_breaks_a_word_at_a_hyphen_only_if_it_must() -> None:
    row = ["node", "no layout 'all-balancd' among its 99; did you mean 'all-balanced'?"]

    shown = " ".join(tables.columns(("NAME", "TEXT"), [row], style=styles.Style(columns=60)))

    assert {"'all-balancd'", "'all-balanced'?"} <= set(shown.split())


def test_the_last_cell_is_wrapped_beside_others_or_gets_its_own_line() -> None:
    head, row = ("TIME", "WHAT", "MESSAGE"), ("2026-11-23 14:16:12Z", "Requested", "word " * 20)

    beside = tables.columns(head, [row], style=styles.Style(columns=80))
    below = tables.columns(head, [row], style=styles.Style(columns=60))

    assert beside[1].startswith("2026-11-23 14:16:12Z  Requested  word word")
    assert beside[2].index("word") == beside[0].index("MESSAGE")
    assert below[:2] == ["TIME                  WHAT", "  MESSAGE"]
    assert below[2:4] == ["2026-11-23 14:16:12Z  Requested", f"  {'word ' * 11}".rstrip()]


def test_the_count_of_a_profile_stays_in_its_line() -> None:
    row = ["8x 7g.40gb, 8x 4g.20gb, 16x 3g.20gb, 24x 2g.10gb, 32x 1g.10gb, 56x 1g.5gb"]

    for columns in range(60, 90):
        lines = tables.columns(("ROOM",), [row], style=styles.Style(columns=columns))
        assert not [line for line in lines if line.endswith("x")]


def test_a_table_is_as_wide_as_its_text_without_a_terminal() -> None:
    row = ["x" * 90, "y" * 90]
    assert tables.columns(("A", "B"), [row], style=styles.Style())[1] == "  ".join(row)


def test_redrawn_lines_replace_those_before() -> None:
    assert styles.redraw(["a", "b"], height=0) == "a\nb\n"
    assert styles.redraw(["c"], height=2) == "\r\x1b[2A\x1b[Jc\n"
    assert styles.redraw((), height=1) == "\r\x1b[1A\x1b[J"
    assert not styles.redraw((), height=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GPU 0", "\x1b[1mGPU 0\x1b[0m · {rest}"),
        (f"GPU 0, {'1' * 60}", f"GPU 0,\n    {'1' * 60}\n    · {{rest}}"),
    ],
    ids=["one line", "a break within it"],
)
def test_a_title_is_painted_unless_the_line_breaks_within_it(name: str, expected: str) -> None:
    rest = "A100-SXM4-40GB"

    title = styles.Style(colour=True, columns=60).title([(name, styles.Tone.STRONG)], [rest])

    assert title == expected.format(rest=rest)
