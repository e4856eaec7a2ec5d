"""What the agent asks of the Kubernetes API: for one reconfiguration, and at rest.

    python bench/api_requests.py [--idle-s 600]

Runs the demonstration's node (embedded API server, simulated GPUs, the real agent process) and
counts the agent's requests in the server's own log.
"""

import argparse
import collections
import functools
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mig_manager.catalogue import hardware
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.sandbox import scenarios, stages
from mig_manager.sandbox.driver import states
from testkit import apiserver

_SPEC = "8xA100-SXM4-40GB"
_PACKAGED = pathlib.Path(__file__).parent.parent / "profiles" / "mig-parted.yaml"
_AGENT_TOKEN = "sandbox"  # noqa: S105 - the embedded server takes any


def main() -> None:
    """Print the counts of each story and of the idle time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle-s", type=float, default=600.0, help="seconds at rest")
    idle_s = parser.parse_args().idle_s
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(_SPEC))]
    text = _PACKAGED.read_text(encoding="utf-8")
    text += scenarios.extra_layouts(gpus, config.parse(text, source="packaged"))
    for name in ("first-layout", "one-slice", "does-not-fit"):
        story = scenarios.STORIES[name]
        server = apiserver.ApiServer()
        with stages.Stage(_SPEC, text, latency=states.REALISTIC, server=server) as stage:
            story.prepare(stage)
            server.log.clear()
            checks = story.play(stage, story.layout(gpus), lambda _text: None)
            assert all(checks.values()), name  # noqa: S101 - a bench of nonsense
            # The last request of a run comes after the state that the story waits for.
            stage.wait(functools.partial(_has_ended, stage.node), "the condition")
            _report(name, server.log.requests())
            if name == "does-not-fit":
                server.log.clear()
                threading.Event().wait(idle_s)
                _report(f"{idle_s:g} s at rest", server.log.requests())


def _has_ended(node: Callable[[], Mapping[str, Any]]) -> bool:
    conditions = node()["status"]["conditions"]
    return any(
        each["type"] == cluster.READY_CONDITION and each["reason"] != "Pending"
        for each in conditions
    )


def _report(title: str, asked: list[apiserver.LoggedRequest]) -> None:
    ours = [one for one in asked if one.token == _AGENT_TOKEN]
    counts = collections.Counter((one.verb, one.resource) for one in ours)
    print(f"{title}: {len(ours)} requests")
    for (verb, resource), count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {count:4}  {verb} {resource}")


if __name__ == "__main__":
    main()
