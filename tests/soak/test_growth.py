"""The agent neither grows nor leaves anything open, however often it reconfigures."""

from collections.abc import Iterator

import pytest
import structlog

from tests.soak import growth


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Keep pytest from collecting log lines, which would be all that grows."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.reset_defaults()


@pytest.mark.slow
def test_agent_does_not_grow_over_a_thousand_reconfigurations() -> None:
    trend = growth.growth(growth.in_memory(1000))

    assert trend.blocks < 0.5
    assert trend.resident < 300
    assert trend.threads <= 0
    assert trend.files <= 0


@pytest.mark.slow
def test_threads_and_files_of_the_agents_process_stay_as_they_are() -> None:
    samples = growth.in_a_process(120)
    trend = growth.growth(samples[len(samples) // 2 :])

    assert trend.threads <= 0
    assert trend.files <= 0
    # The allocator still fills its caches, in steps: some 30 kB each in the first sixty runs, and
    # 3 kB after a hundred.
    assert trend.resident < 30_000


def test_growth_by_one_file_a_run_is_found_beside_one_that_ends() -> None:
    samples = [
        growth.Sample(runs=number, blocks=0, resident=0, threads=7, files=8 + number + number % 2)
        for number in range(60)
    ]

    trend = growth.growth(samples)

    assert trend.files > 0
    assert trend.threads == 0
