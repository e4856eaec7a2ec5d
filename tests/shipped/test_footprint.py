"""What processes load of modules, and what the agent at rest has of memory."""

import os
import pathlib
import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.rigs import programs
from tests.rigs.shell import commandline
from tests.rigs.stage import agent_stage

_LIMIT_KIB = 45 << 10
_FORBIDDEN = frozenset(
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


_CLIENTS = """
aiohttp asyncio.events google.protobuf grpc jeepney kubernetes prometheus_client pydantic pynvml
requests ssl urllib3 watchdog
"""
"""Modules to talk to what most commands do not talk to."""
_PROGRAM = """
import runpy
def program(*argv):
    sys.argv = ["mig-manager", *argv]
    try:
        runpy.run_module("mig_manager", run_name="__main__")
    except SystemExit:
        pass
"""
_WORKER = """
from mig_manager.adapters.host import worker_parent
from mig_manager.adapters.nvml import library, worker
"""
_PROCESSES = {
    "help, version and mistakes": (
        f"""{_PROGRAM}
from mig_manager.cli import registry
# The others complete layouts, or have decisions on many nodes among their settings.
helps = {{*registry.PROGRAM.commands}} - {{"completion", "partitioner", "rollout"}}
for argv in ("--help", "version", "frob", *(f"{{name}} --help" for name in helps)):
    program(*argv.split())
""",
        f"structlog yaml {_CLIENTS}",
    ),
    "apply": (
        f"""{_PROGRAM}
program("apply", "all-disabled", *{commandline.SPEC!r})
assert sys.modules["mig_manager.change.applying"]
""",
        _CLIENTS,
    ),
    "the kubectl plugin": (
        """
import mig_manager.kubectl.main
from mig_manager.kubectl import plugin_registry
for row in plugin_registry.PROGRAM.rows:
    plugin_registry.PROGRAM.options_of(row.name)
""",
        """
        google grpc kubernetes prometheus_client pynvml starlette structlog tenacity urllib3
        uvicorn watchdog mig_manager.adapters.kubernetes.api mig_manager.adapters.nvml.nvml_gpus
        mig_manager.sandbox
        """,
    ),
    "the agent of a node with GPUs": (
        """
from mig_manager.adapters.kubernetes import api
from mig_manager.agent import agent_settings, main
chosen = agent_settings.AgentSettings.read({"node_name": "node-a"}, {})
main.Agent(chosen, api.KubeApi.at("http://127.0.0.1:9"), boot_id="")
""",
        "grpc pynvml mig_manager.cli mig_manager.sandbox",
    ),
    "a worker of the driver": (
        # Without a request it ends with status 1.
        f"{_WORKER}assert worker.main(['serve']) == 1",
        "ctypes.util datetime ipaddress json subprocess tempfile tenacity urllib.parse yaml"
        # Before Python 3.12 dataclasses does not ask it for annotations.
        + " inspect" * (sys.version_info < (3, 12)),
    ),
    "a listener to the driver": (
        f"""{_WORKER}
from mig_manager.adapters.nvml import events
def listening(*_):
    raise BrokenPipeError
events.listening = listening
worker_parent.Parent.end_with_stdin = lambda _: None
assert worker.main(["listen"]) == 0
""",
        """
        kubernetes structlog tenacity yaml concurrent.futures datetime json subprocess
        mig_manager.agent mig_manager.change mig_manager.core mig_manager.sandbox
        """,
    ),
    "a client of kubelet": (
        """
from mig_manager.adapters import pod_resources
pod_resources.load()
assert sys.modules["grpc"]
""",
        "tenacity asyncio grpc.aio",
    ),
}
"""What a process runs, and what it must not load for that."""
_QUICKLY = ("help, version and mistakes", "apply", "the agent of a node with GPUs")
"""What the image's build loads without any dependency, and the two with most modules.

To start each costs half a second.
"""


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        pytest.param(*each, id=name, marks=[] if name in _QUICKLY else pytest.mark.slow)
        for name, each in _PROCESSES.items()
    ],
)
def test_a_process_loads_nothing_that_it_does_not_need(
    code: str, forbidden: str, tmp_path: pathlib.Path
) -> None:
    # A module that is deferred is false until it is used.
    listing = (
        "print('LOADED', *(name for name in sys.modules if sys.modules[name]), file=sys.stderr)"
    )
    done = programs.run(
        *(sys.executable, "-c", f"import sys\n{code}\n{listing}"), XDG_STATE_HOME=str(tmp_path)
    )

    assert done.returncode == 0, done.stderr
    loaded = done.stderr.rpartition("LOADED")[2].split()
    prefixes = tuple(f"{name}." for name in forbidden.split())
    assert [name for name in loaded if f"{name}.".startswith(prefixes)] == []


@pytest.fixture
def modules_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return the file to which agents started from now on write their loaded modules."""
    (tmp_path / "sitecustomize.py").write_text(_REPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MODULES_FILE", str(tmp_path / "modules"))
    return tmp_path / "modules"


@pytest.fixture
def stage_at_rest() -> Iterator[agent_stage.AgentStage]:
    """Have an agent that has changed the layout twice."""
    with agent_stage.AgentStage("2xA100-SXM4-40GB") as stage:
        for layout in ("all-1g.5gb", "all-balanced"):
            stage.apply_layout(layout)
        yield stage


def agent(stage: agent_stage.AgentStage) -> int:
    assert stage.machine.agent is not None
    return stage.machine.agent.pid


@pytest.mark.slow
def test_an_agent_at_rest_has_loaded_no_module_of_runs_or_commands(
    modules_file: pathlib.Path, stage_at_rest: agent_stage.AgentStage
) -> None:
    os.kill(agent(stage_at_rest), signal.SIGRTMIN)
    stage_at_rest.wait(modules_file.exists, "the agent's modules", timeout_s=120)
    loaded = set(modules_file.read_text().split())
    assert {"kubernetes.client.rest", "structlog"} <= loaded
    assert loaded & _FORBIDDEN == set()


@pytest.mark.slow
def test_only_the_agents_process_remains_after_a_run(
    stage_at_rest: agent_stage.AgentStage,
) -> None:
    children = pathlib.Path(f"/proc/{agent(stage_at_rest)}/task/{agent(stage_at_rest)}/children")
    stage_at_rest.wait(lambda: not children.read_text().split(), "the end of the agent's workers")


@pytest.mark.slow
def test_an_agent_at_rest_fits_into_its_memory(stage_at_rest: agent_stage.AgentStage) -> None:
    rollup = pathlib.Path(f"/proc/{agent(stage_at_rest)}/smaps_rollup").read_text()
    (resident_kib,) = re.findall(r"^Rss: +(\d+) kB$", rollup, re.MULTILINE)
    assert int(resident_kib) <= _LIMIT_KIB
