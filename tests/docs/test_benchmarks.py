"""The benchmarks behind the pages: small cases of the quick ones, and that the others start."""

import sys

import pytest

from tests.docs import pages
from tests.rigs import programs

pytestmark = pytest.mark.slow

BENCH = pages.ROOT / "bench"
NAMES = sorted(
    {path.stem for path in BENCH.glob("*.py")}
    | {path.parent.name for path in BENCH.glob("*/__main__.py")}
)


def run(name: str, *options: str) -> str:
    return programs.output(sys.executable, "-m", f"bench.{name}", *options, cwd=pages.ROOT)


@pytest.mark.parametrize(
    ("name", "options", "result"),
    [
        ("api_requests", ("--idle-s", "1"), "at rest: 0 requests"),
        ("partitioner_scale", ("--here", "30x30"), '"first_s"'),
        ("rollout_scale", ("--nodes", "50"), '"state": "done"'),
    ],
)
def test_a_benchmark_measures_a_small_case(
    name: str, options: tuple[str, ...], result: str
) -> None:
    assert result in run(name, *options)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_explains_its_options(name: str) -> None:
    assert "--help" in run(name, "--help")
