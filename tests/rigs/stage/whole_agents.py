"""Whole agents of many nodes in this process, on one embedded API server.

Each has a watch, a client, a pipeline and slots of its own; only the GPUs and kubelet are values
in memory.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from mig_manager.adapters.kubernetes import watch
from mig_manager.agent import agent_settings, main
from mig_manager.core import timing
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.node import agents, fake_cluster, fake_host, fakes, gpu_values, node_rig
from tests.rigs.stage import in_process

NAMESPACE = "mig-manager"
_WATCH_TIMES = watch.WatchTimes(pauses=timing.Backoff(first_s=0.05, max_s=0.2))


def node_names(count: int) -> list[str]:
    return [f"node-{number:03}" for number in range(count)]


def populate(server: apiserver.ApiServer, count: int, **labels: str) -> list[str]:
    for name in node_names(count):
        server.store.create(api_objects.a_node(name, labels))
    return node_names(count)


def label_all(server: apiserver.ApiServer, names: Sequence[str], layout: str) -> None:
    """Do what ``kubectl label nodes`` does for many."""
    metadata = {"labels": {well_known.CONFIG_LABEL: layout}}
    for name in names:
        server.merge(kinds.NODES, name, {"metadata": metadata})


def is_applied(server: apiserver.ApiServer, name: str, layout: str) -> bool:
    labels = server.get(kinds.NODES, name)["metadata"]["labels"]
    labels_now = (labels.get(well_known.APPLIED_LABEL), labels.get(well_known.STATE_LABEL))
    return labels_now == (layout, run_status.State.SUCCESS.value)


def in_memory(name: str, folder: pathlib.Path, **options: str) -> dict[str, Any]:
    """Return how ``in_process`` has an agent whose GPUs and kubelet are values in memory.

    Args:
        name: The agent's node.
        folder: For the agent's lock and other files.
        options: Of the agent's command line.
    """
    rig = node_rig.NodeRig(gpus=gpu_values.gpus_of("A100-SXM4-40GB"))
    gpus = fake_host.FakeGpus(rig)
    named = {"node_name": name, "simulate_state": str(folder / f"{name}.json")}
    return {
        "settings": agent_settings.AgentSettings.read(named | options, {}),
        "gpus": gpus,
        "allocations": fake_cluster.FakeAllocations(rig),
        "layout_source": fakes.FakeTextSource(agents.LAYOUTS_TEXT),
        "processes": gpus.processes,
        "overrides": main.Overrides(watch_times=_WATCH_TIMES, watches_files=False),
    }


@contextlib.contextmanager
def hosts(server: apiserver.ApiServer, names: Sequence[str], *, limit: int = 0) -> Iterator[None]:
    """Have an agent on each node; ``limit`` is how many may change at once, 0 all."""
    options = {
        "retry_initial_s": "0.2",
        "retry_max_s": "1.0",
        "max_concurrent_nodes": str(limit),
        "slots_namespace": NAMESPACE,
    }
    with tempfile.TemporaryDirectory() as folder:
        running = [
            in_process.HostedAgent(
                server, name, **in_memory(name, pathlib.Path(folder), **options)
            )
            for name in names
        ]
        try:
            yield
        finally:
            for one in running:
                one.stop()
            for one in running:
                one.end()
