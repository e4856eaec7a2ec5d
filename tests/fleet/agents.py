"""Whole agents of many nodes in this process, on one embedded API server.

Each has a watch, a client, a pipeline and slots of its own; only the GPUs and kubelet are values
in memory.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mig_manager.adapters.kubernetes import api, watch
from mig_manager.agent import main, settings
from mig_manager.catalogue import hardware
from mig_manager.core import model, ports, standbys, timing
from mig_manager.core.node import well_known
from mig_manager.sandbox.apiserver import resources, store
from testkit import apiserver
from tests.node import fakes, scenes
from tests.stage import apirig

NAMESPACE = "mig-manager"
DEADLINE_S = 120.0
_WATCH_TIMES = watch.WatchTimes(pauses=timing.Backoff(first_s=0.05, max_s=0.2))


def names(count: int) -> list[str]:
    return [f"node-{number:03}" for number in range(count)]


def populate(server: apiserver.ApiServer, count: int, **labels: str) -> list[str]:
    for name in names(count):
        server.store.create(apirig.a_node(name, **labels))
    return names(count)


def label_all(server: apiserver.ApiServer, names: Sequence[str], layout: str) -> None:
    """Do what ``kubectl label nodes`` does for many."""

    def change(thing: store.Object) -> None:
        thing["metadata"]["labels"][well_known.CONFIG_LABEL] = layout

    for name in names:
        server.modify(resources.NODES, name, change)


def is_applied(server: apiserver.ApiServer, name: str, layout: str) -> bool:
    labels = server.get(resources.NODES, name)["metadata"]["labels"]
    labels_now = (labels.get(well_known.APPLIED_LABEL), labels.get(well_known.STATE_LABEL))
    return labels_now == (layout, model.State.SUCCESS.value)


class Hosted:
    def __init__(
        self,
        server: apiserver.ApiServer,
        name: str,
        folder: pathlib.Path,
        *,
        limit: int = 0,
    ) -> None:
        self._stopped = threading.Event()
        self.kube = api.KubeApi.at(
            server.url,
            token=name,
            sleep=lambda seconds: self._stopped.wait(min(seconds, 0.05)),
        )
        self.rig = fakes.NodeRig(gpus=(hardware.template(hardware.find("A100-SXM4-40GB")),))
        self._service = assembled(
            self.kube,
            name,
            self.rig,
            folder,
            retry_initial_s="0.2",
            retry_max_s="1.0",
            max_concurrent_nodes=str(limit),
            slots_namespace=NAMESPACE,
        )
        self._thread = threading.Thread(target=self._service.serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._service.stop()

    def end(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()
        self.kube.close()


def assembled(
    kube: api.KubeApi, name: str, rig: fakes.NodeRig, folder: pathlib.Path, **options: str
) -> main.AgentService:
    """Assemble an agent whose GPUs and kubelet are values in memory.

    Args:
        kube: The API.
        name: The agent's node.
        rig: Has the GPUs and kubelet.
        folder: For the agent's lock and other files.
        options: Of the agent's command line.
    """

    def in_memory(own: ports.Dependencies) -> ports.Dependencies:
        return dataclasses.replace(
            own,
            gpus=rig.hardware,
            allocations=rig.allocations,
            configs=fakes.FakeConfig(scenes.CONFIG),
            processes=None,
            standby=standbys.Standbys(),
        )

    state = folder / f"{name}.json"
    return main.AgentService(
        settings.AgentSettings.read(
            {"node_name": name, "simulate_state": str(state)} | options, {}
        ),
        kube,
        boot_id="boot-1",
        overrides=main.Overrides(
            replace_ports=in_memory, watch_times=_WATCH_TIMES, watches_files=False
        ),
    )


@contextlib.contextmanager
def hosted(
    server: apiserver.ApiServer, names: Sequence[str], **how: Any
) -> Iterator[dict[str, Hosted]]:
    with tempfile.TemporaryDirectory() as folder:
        running = {name: Hosted(server, name, pathlib.Path(folder), **how) for name in names}
        try:
            yield running
        finally:
            for one in running.values():
                one.stop()
            for one in running.values():
                one.end()
