"""A cluster of one node that has neither GPUs nor a device plugin, for agents that simulate."""

import contextlib
import json
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mig_manager.core.node import well_known
from mig_manager.sandbox.node import cluster_view, objects

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "plain"}}
POLL_S = 0.5
TIMEOUT_S = 60.0


class PlainNode:
    """A cluster with the one node ``plain``."""

    def __init__(self, url: str, log: pathlib.Path) -> None:
        self._cluster = cluster_view.ClusterView(url)
        self._log = log
        self._changed = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator["PlainNode"]:
        """Follow what happens for as long as the body runs."""
        with self._cluster:
            stop = self._cluster.listen(lambda _kind, _obj: self._changed.set())
            yield self
            stop()

    def node(self) -> dict[str, Any]:
        return dict(self._cluster.node("plain") or {})

    def schedulable(self) -> dict[str, str]:
        """Return the devices that pods can be scheduled on."""
        status = self.node().get("status") or {}
        assert status.get("capacity") == status.get("allocatable")
        return dict(status.get("capacity") or {})

    def label(self, layout: str) -> None:
        change = {"metadata": {"labels": {well_known.CONFIG_LABEL: layout}}}
        self._cluster.patch(cluster_view.Kind.NODE, self.node(), change)

    def register_again(self, *, layout: str, taint: str) -> None:
        """Delete the Node and create it again, as ``kubectl delete node`` and kubelet do."""
        labels = {well_known.CONFIG_LABEL: layout}
        taints = [{"key": taint, "effect": "NoSchedule"}]
        self._cluster.delete(cluster_view.Kind.NODE, self.node())
        self._cluster.create(
            cluster_view.Kind.NODE,
            {**NODE, "metadata": {"name": "plain", "labels": labels}, "spec": {"taints": taints}},
        )

    def wait_for_end(self, layout: str) -> str:
        """Return the state in which the run for a layout ended."""

        def has_ended() -> bool:
            text = objects.annotations(self.node()).get(well_known.STATUS_ANNOTATION, "{}")
            status = json.loads(text)
            return status.get("config") == layout and "finishedAt" in status

        self.wait(has_ended)
        return objects.labels(self.node())[well_known.STATE_LABEL]

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the node holds."""
        for _ in range(int(TIMEOUT_S / POLL_S)):
            self._changed.clear()
            if holds():
                return
            self._changed.wait(POLL_S)
        pytest.fail(f"waited in vain; the agent's log: {self._log.read_text()[-2000:]}")


@contextlib.contextmanager
def running(
    command: list[str], log: pathlib.Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as stream,
        subprocess.Popen(  # noqa: S603 - our own program and our own arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environ,
        ) as agent,
    ):
        try:
            yield agent
        finally:
            agent.terminate()
