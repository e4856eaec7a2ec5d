"""What holds for every test."""

import faulthandler
import gc
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Generator
from typing import Protocol, TypeVar

import hypothesis
import pytest
import structlog
from hypothesis.internal.conjecture import providers

pytest_plugins = ["tests.rigs.matrices.matrix_results"]

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

# Tests start hundreds of Python processes; without this each compiles all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_STARTUP = pathlib.Path(__file__).parents[1] / "testkit" / "startup"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH")))
)

# A shell's job in the background ignores the first two signals, and one under nohup the third.
# Its child processes inherit that, and tests send them these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A slow machine is no bug. A change is judged by the same examples as the one before it, by more
# of them in CI. Others are tried by hand, with --hypothesis-profile random, or fuzz for hours.
_PROFILES = {"fixed": 10, "thorough": 200, "random": 400, "fuzz": 20_000}
_RANDOM = ("random", "fuzz")
for _profile, _examples in _PROFILES.items():
    hypothesis.settings.register_profile(
        _profile,
        hypothesis.settings(),
        deadline=None,
        derandomize=_profile not in _RANDOM,
        max_examples=_examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("fixed")

# What hangs must fail. pyproject.toml has the limit of the other tests, far above what they take
# on a machine with other work.
_LIMITS_S = {"slow": 1800, "release": 1800, "cluster": 3600, "realnode": 3600}
_THREAD_END_S = 60.0
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that no test captures, and the same examples in each process."""
    config.stash[_STDERR] = os.dup(2)
    if config.getoption("--hypothesis-profile") not in _RANDOM:
        # Else hypothesis also tries the literals of all loaded modules: other examples after each
        # edit of the product, and in each worker. There is no setting for it.
        assert "is_local_module_file" in vars(providers)
        vars(providers).update(is_local_module_file=lambda _path: False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the thousands of tests, neither now nor while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close it."""
    os.close(config.stash[_STDERR])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests more time; the first one of a cluster may also build Kubernetes."""
    for item in items:
        limits = [_LIMITS_S.get(mark.name, 0) for mark in item.iter_markers()]
        if any(limits):
            item.add_marker(pytest.mark.timeout(max(limits)))


class _Limit(Protocol):
    timeout: float


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(
    item: pytest.Item, settings: _Limit
) -> Generator[None, object, object]:
    """End this process with all stacks if the test has not ended long after its time limit.

    A signal makes the test fail at its limit. It cannot interrupt a library, nor a clean-up that
    hangs afterwards.
    """
    if sys.gettrace() is None:  # no debugger
        faulthandler.dump_traceback_later(
            2 * settings.timeout, exit=True, file=item.config.stash[_STDERR]
        )
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """End that limit with the test."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    """Let a person take their time."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def structlog_defaults() -> Generator[None]:
    """Log plainly, and undo what a test configures: a logger keeps that for those that follow."""
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def ended_threads(request: pytest.FixtureRequest) -> Generator[None]:
    """Let no thread outlive its test: it would log into what a later one captures.

    Slower tests share servers and clusters, whose threads end with the last of these tests.
    """
    others = set(threading.enumerate())
    yield
    if any(map(request.node.get_closest_marker, _LIMITS_S)):
        return
    while started := set(threading.enumerate()) - others:
        thread = started.pop()
        thread.join(_THREAD_END_S)
        assert not thread.is_alive(), f"the thread {thread.name} outlives its test"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test in CI that skips itself, because CI installs what tests need; but no GPU."""
    report = yield
    return report if item.get_closest_marker("gpu") else _failed_where_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module in CI that skips itself as a whole."""
    return _failed_where_skipped((yield))


def _failed_where_skipped(report: _Report) -> _Report:
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but CI must run it: {report.longrepr}"
    return report
