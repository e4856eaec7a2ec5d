"""Count the agent's requests to the Kubernetes API: for one reconfiguration, and at rest.

    python bench/api_requests.py [--idle-s 600]

Runs the demonstration's node (embedded API server, simulated GPUs, the real agent process) and
reads the log of the server.
"""

import argparse
import collections
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mig_manager.adapters.host import process
from mig_manager.catalogue import hardware
from mig_manager.core.layout import layout_parser
from mig_manager.core.objects import well_known
from mig_manager.sandbox import demo_layouts, scenarios, stages
from mig_manager.sandbox.driver import states
from testkit import apiserver

_SPEC = "8xA100-SXM4-40GB"
_AGENT_TOKEN = "sandbox"  # noqa: S105 - the embedded server takes any


def main() -> None:
    """Print the counts of each scenario and of the idle time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle-s", type=float, default=600.0, help="seconds at rest")
    idle_s = parser.parse_args().idle_s
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(_SPEC))]
    text = process.packaged_config().read_text(encoding="utf-8")
    text += demo_layouts.render(gpus, layout_parser.parse(text, source="packaged"))
    for name in ("first-layout", "one-slice", "does-not-fit"):
        scenario = scenarios.BY_NAME[name]
        server = apiserver.ApiServer()
        with stages.Stage(_SPEC, text, latency=states.REALISTIC, server=server) as stage:
            scenario.prepare(stage)
            server.log.clear()
            checks = scenario.play(stage, scenario.layout(gpus), lambda _text: None)
            assert all(checks.values()), name  # noqa: S101 - else the figures are wrong
            # The last request of a run follows the state that the scenario waits for.
            stage.wait(functools.partial(_has_ended, stage.node), "the condition")
            _report(name, server.log.requests())
            if name == "does-not-fit":
                server.log.clear()
                threading.Event().wait(idle_s)
                _report(f"{idle_s:g} s at rest", server.log.requests())


def _has_ended(node: Callable[[], Mapping[str, Any]]) -> bool:
    conditions = node()["status"]["conditions"]
    return any(
        each["type"] == well_known.READY_CONDITION and each["reason"] != "Pending"
        for each in conditions
    )


def _report(title: str, requests: list[apiserver.LoggedRequest]) -> None:
    counts = collections.Counter(
        (each.verb, each.resource) for each in requests if each.token == _AGENT_TOKEN
    )
    print(f"{title}: {counts.total()} requests")
    for (verb, resource), count in counts.most_common():
        print(f"  {count:4}  {verb} {resource}")


if __name__ == "__main__":
    main()
