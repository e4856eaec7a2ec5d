"""The real agent on a node without GPUs: what it simulates the node offers to the scheduler."""

import contextlib
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager.core import cluster
from mig_manager.sandbox import apiserver
from mig_manager.sandbox.cluster import objects, view

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "plain"}}
LOOK_AGAIN_S = 0.5
TIMEOUT_S = 60.0


class World:
    """A cluster of one node that has neither GPUs nor a device plugin, and our agent on it."""

    def __init__(self, url: str, log: pathlib.Path) -> None:
        self._cluster = view.ClusterView(url)
        self._log = log
        self._changed = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator["World"]:
        with self._cluster:
            stop = self._cluster.listen(lambda _kind, _obj: self._changed.set())
            yield self
            stop()

    def node(self) -> dict[str, Any]:
        return dict(self._cluster.node("plain") or {})

    def offered(self) -> dict[str, str]:
        """Return what the scheduler may give away."""
        status = self.node().get("status") or {}
        assert status.get("capacity") == status.get("allocatable")
        return dict(status.get("capacity") or {})

    def label(self, layout: str) -> None:
        change = {"metadata": {"labels": {cluster.CONFIG_LABEL: layout}}}
        self._cluster.patch(view.Kind.NODE, self.node(), change)

    def wait_for_end(self, layout: str) -> str:
        def has_ended() -> bool:
            text = objects.annotations(self.node()).get(cluster.STATUS_ANNOTATION, "{}")
            status = json.loads(text)
            return status.get("config") == layout and "finishedAt" in status

        self.wait(has_ended)
        return objects.labels(self.node())[cluster.STATE_LABEL]

    def wait(self, holds: Callable[[], bool]) -> None:
        for _ in range(int(TIMEOUT_S / LOOK_AGAIN_S)):
            self._changed.clear()
            if holds():
                return
            self._changed.wait(LOOK_AGAIN_S)
        pytest.fail(f"waited in vain; the agent's log: {self._log.read_text()[-2000:]}")


@contextlib.contextmanager
def running(command: list[str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as stream,
        subprocess.Popen(  # noqa: S603 - our own program and our own arguments
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        ) as agent,
    ):
        try:
            yield agent
        finally:
            agent.terminate()


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    with apiserver.serve() as server:
        server.store.create(NODE)
        command = [
            *(sys.executable, "-m", "mig_manager", "agent", "--node-name", "plain"),
            *("--kubeconfig", str(server.kubeconfig(tmp_path / "kubeconfig"))),
            *("--pod-resources-socket", str(tmp_path / "none.sock")),
            *("--simulate", "8xA100-SXM4-40GB", "--simulate-state", str(tmp_path / "gpus.json")),
            *("--advertise-simulated", "--poll-interval-s", "0.2"),
        ]
        log = tmp_path / "agent.log"
        with running(command, log), World(server.url, log).watched() as found:
            yield found


def test_a_node_without_gpus_offers_the_simulated_ones_as_each_layout_cuts_them(
    world: World,
) -> None:
    world.wait(lambda: world.offered() == {"nvidia.com/gpu": "8"})

    world.label("all-1g.5gb")

    assert world.wait_for_end("all-1g.5gb") == "success"
    assert world.offered() == {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}

    world.label("all-3g.20gb")

    assert world.wait_for_end("all-3g.20gb") == "success"
    assert world.offered() == {
        "nvidia.com/gpu": "0",
        "nvidia.com/mig-1g.5gb": "0",
        "nvidia.com/mig-3g.20gb": "16",
    }


def test_real_gpus_are_never_advertised_by_the_agent() -> None:
    command = [sys.executable, "-m", "mig_manager", "agent", "--node-name", "plain"]
    done = subprocess.run(  # noqa: S603 - our own program and our own arguments
        [*command, "--advertise-simulated"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 2
    assert "--advertise-simulated goes with --simulate alone" in done.stderr
