"""An API server and a client whose watches tests follow and break."""

import contextlib
from collections.abc import Iterator
from typing import Any

from mig_manager.adapters.kubernetes import api, responses, watch
from mig_manager.core import timing
from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects, waiting

SOON_S = 20.0

BRISK = watch.WatchTimes(
    watch_s=300, steady_s=0.0, pauses=timing.Backoff(first_s=0.01, max_s=0.05, factor=2.0)
)


class FaultyApi(api.KubeApi):
    """A client with a bug, which ends some watches. It notes the requested time-outs."""

    faults = 0

    def watch(self, *args: Any, **options: Any) -> responses.WatchStream:
        self.timeout_s = options["idle_timeout_s"]
        if self.faults:
            self.faults -= 1
            raise LookupError("a bug")
        return super().watch(*args, **options)


def a_node(layout: str = "one", name: str = "n1") -> dict[str, Any]:
    return api_objects.a_node(name, {well_known.CONFIG_LABEL: layout})


def label(server: apiserver.ApiServer, layout: str, name: str = "n1") -> None:
    server.merge(kinds.NODES, name, {"metadata": {"labels": {well_known.CONFIG_LABEL: layout}}})


@contextlib.contextmanager
def serving() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve(apiserver.ApiServer(bookmark_period_s=0.05)) as running:
        running.create(a_node())
        yield running


def wait_for_watch(server: apiserver.ApiServer) -> None:
    waiting.until(lambda: server.watch_count == 1, "the watch")


@contextlib.contextmanager
def faulty_api(server: apiserver.ApiServer, **options: Any) -> Iterator[FaultyApi]:
    kube = FaultyApi.at(server.url, sleep=lambda _seconds: None, **options)
    yield kube
    kube.close()
