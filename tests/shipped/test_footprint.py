"""What the agent's process has of memory and of modules when it has nothing to do."""

import pathlib
import re
import signal
from collections.abc import Iterator

import pytest

from mig_manager.core import model
from mig_manager.sandbox import stages
from tests import agent_stage

_LIMIT_KIB = 45 << 10
_UNWANTED = frozenset(
    {
        "aiohttp",
        "asyncio.events",
        "google.protobuf",
        "grpc",
        "jeepney",
        "kubernetes.client.api_client",
        "kubernetes.client.models",
        "kubernetes.dynamic",
        "oauthlib.oauth2.rfc6749",
        "prometheus_client",
        "pydantic",
        "pynvml",
        "requests",
        "xml.etree.ElementTree",
        "zipfile",
    }
)
_REPORT = """
import os, signal, sys

def report(*_):
    with open(os.environ["MODULES_FILE"] + ".new", "w") as file:
        file.write(" ".join(sys.modules))
    os.rename(os.environ["MODULES_FILE"] + ".new", os.environ["MODULES_FILE"])

if "agent" in sys.orig_argv:
    signal.signal(signal.SIGRTMIN, report)
"""
"""Code that makes an agent's interpreter report its loaded modules on a signal."""


@pytest.fixture
def modules_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return the file to which agents started from now on write their loaded modules."""
    (tmp_path / "sitecustomize.py").write_text(_REPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MODULES_FILE", str(tmp_path / "modules"))
    return tmp_path / "modules"


@pytest.fixture
def rested() -> Iterator[stages.Stage]:
    """Have an agent that has changed the layout twice."""
    with agent_stage.Stage("2xA100-SXM4-40GB") as stage:
        for layout in ("all-1g.5gb", "all-balanced"):
            stage.label(layout)
            assert stage.wait_for_end(layout) is model.State.SUCCESS
        yield stage


def agent(stage: stages.Stage) -> int:
    assert stage.machine.agent is not None
    return stage.machine.agent.pid


def test_an_agent_at_rest_has_loaded_nothing_that_only_runs_or_others_need(
    modules_file: pathlib.Path, rested: stages.Stage
) -> None:
    assert rested.machine.agent is not None
    rested.machine.agent.send_signal(signal.SIGRTMIN)
    rested.wait(modules_file.exists, "the agent's modules", timeout_s=120)
    loaded = set(modules_file.read_text().split())
    assert {"kubernetes.client.rest", "structlog"} <= loaded
    assert loaded & _UNWANTED == set()


@pytest.mark.slow
def test_nothing_but_the_agent_is_left_of_a_run(rested: stages.Stage) -> None:
    children = pathlib.Path(f"/proc/{agent(rested)}/task/{agent(rested)}/children")
    rested.wait(lambda: not children.read_text().split(), "the end of the agent's workers")


@pytest.mark.slow
def test_an_agent_at_rest_fits_into_its_memory(rested: stages.Stage) -> None:
    rollup = pathlib.Path(f"/proc/{agent(rested)}/smaps_rollup").read_text()
    (resident_kib,) = re.findall(r"^Rss: +(\d+) kB$", rollup, re.MULTILINE)
    assert int(resident_kib) <= _LIMIT_KIB
