"""Whole agents of many nodes in this process, on one embedded API server.

Each has a watch, a client, a pipeline and slots of its own; only the GPUs and kubelet are values
in memory.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from mig_manager import agent, mailbox, reconcile
from mig_manager.adapters import clock
from mig_manager.adapters.kube import api, node, nodewatch, pods, slots
from mig_manager.core import cluster, model
from mig_manager.sandbox import apiserver, hardware
from mig_manager.sandbox.api import resources, stores
from tests import fakes, scenes
from tests.sandbox import apirig

NAMESPACE = "mig-manager"
DEADLINE_S = 120.0
_PACE = nodewatch.Pace(first_wait_s=0.05, longest_wait_s=0.2)


def names(count: int) -> list[str]:
    return [f"node-{number:03}" for number in range(count)]


def populate(server: apiserver.ApiServer, count: int, **labels: str) -> list[str]:
    """Create nodes and return their names."""
    for name in names(count):
        server.store.create(apirig.a_node(name, **labels))
    return names(count)


def label_all(server: apiserver.ApiServer, names: Sequence[str], layout: str) -> None:
    """Do what ``kubectl label nodes`` does for many."""

    def change(thing: stores.Object) -> None:
        thing["metadata"]["labels"][cluster.CONFIG_LABEL] = layout

    for name in names:
        server.store.modify(resources.NODES, name, change)


def is_applied(server: apiserver.ApiServer, name: str, layout: str) -> bool:
    labels = server.store.get(resources.NODES, name)["metadata"]["labels"]
    told = (labels.get(cluster.APPLIED_LABEL), labels.get(cluster.STATE_LABEL))
    return told == (layout, model.State.SUCCESS.value)


def wait(holds: Callable[[], bool], what: str, *, timeout_s: float = DEADLINE_S) -> None:
    pause = threading.Event()
    system = clock.SystemClock()
    deadline_s = system.monotonic() + timeout_s
    while not holds():
        if system.monotonic() > deadline_s:
            pytest.fail(f"waited {timeout_s:g} s in vain for {what}")
        pause.wait(0.05)


class Hosted:
    """The agent of one node."""

    def __init__(
        self,
        server: apiserver.ApiServer,
        name: str,
        *,
        limit: int,
        request_timeout_s: float = 10.0,
    ) -> None:
        self.stop = threading.Event()
        self.box = mailbox.Mailbox()
        self.kube = api.KubeApi.at(
            server.url,
            token=name,
            request_timeout_s=request_timeout_s,
            sleep=lambda seconds: self.stop.wait(min(seconds, 0.05)),
        )
        product = hardware.find("A100-SXM4-40GB")
        self.world = fakes.World(gpus=(hardware.template(product),))
        system = clock.SystemClock()
        held = slots.LeaseSlots(
            self.kube, namespace=NAMESPACE, node_name=name, limit=limit, clock=system
        )
        self.pipeline = reconcile.Reconciler(
            reconcile.World(
                gpus=self.world.hardware,
                node=node.KubeNode(self.kube, name=name, clock=system),
                workloads=pods.KubeWorkloads(self.kube, node_name=name),
                allocations=self.world.allocations,
                configs=fakes.FakeConfig(scenes.CONFIG),
                clock=system,
                slots=held if limit else None,
            ),
            reconcile.Limits(),
        )
        served = agent.Agent(
            self.pipeline,
            self.box,
            patience=agent.Patience(retry_initial_s=0.2, retry_max_s=1.0),
        )
        watch = nodewatch.NodeWatch(
            self.kube,
            name=name,
            on_node=lambda view: self.box.put_label(view.labels.get(cluster.CONFIG_LABEL)),
            stop=self.stop,
            pace=_PACE,
        )
        self.threads = [
            threading.Thread(target=work, daemon=True) for work in (watch.run, served.serve)
        ]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.box.stop()
        self.stop.set()
        for thread in self.threads:
            thread.join(30)
        self.kube.close()


@contextlib.contextmanager
def hosted(
    server: apiserver.ApiServer,
    names: Sequence[str],
    *,
    limit: int = 0,
    request_timeout_s: float = 10.0,
) -> Iterator[dict[str, Hosted]]:
    """Run the agents of these nodes, with a budget if there is a limit."""
    running = {
        name: Hosted(server, name, limit=limit, request_timeout_s=request_timeout_s)
        for name in names
    }
    try:
        yield running
    finally:
        for one in running.values():
            one.box.stop()
        for one in running.values():
            one.end()
