"""Whole agents in this process: no worker process stands between them and GPUs and kubelet."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.kubernetes import api
from mig_manager.adapters.nvml import nvml_gpus
from mig_manager.agent import agent_settings, main
from mig_manager.core import liveness, ports
from testkit import apiserver
from tests.rigs.node import simulated_rig

_MAX_PAUSE_S = 0.02
_STOP_S = 120.0
_WATCH_END_S = 30.0  # less than an idle watch lasts

Wrap = Callable[[ports.Dependencies], ports.Dependencies]


class QuickClock(host.SystemClock):
    """Does not let the driver take its time."""

    def wait(self, seconds: float) -> None:
        """Sleep through, but not for long."""
        super().wait(min(seconds, _MAX_PAUSE_S))


class Pulse(liveness.Pulse):
    """Knows whether the agent waits for something that may never come, and says so."""

    def __init__(self, on_rest: Callable[[], None]) -> None:
        super().__init__(time.monotonic)
        self.is_resting = False
        self._on_rest = on_rest

    def rest(self) -> None:
        super().rest()
        self.is_resting = True
        self._on_rest()

    def beat(self) -> None:
        super().beat()
        self.is_resting = False


def new_agent(
    settings: agent_settings.AgentSettings,
    kube: api.KubeApi,
    *,
    boot_id: str = "boot-1",
    wrap: Wrap = lambda deps: deps,
    overrides: main.Overrides | None = None,
    **other_ports: Any,
) -> main.Agent:
    """Assemble an agent without worker processes.

    Args:
        settings: Of the agent.
        kube: Its API.
        boot_id: Of its machine.
        wrap: Stands before the ports.
        overrides: Further parts that are not the agent's own.
        other_ports: Ports of other kinds than NVML, kubelet's socket, and what the settings name.
    """
    gpus = nvml_gpus.NvmlGpus(
        clock=other_ports.get("clock") or host.SystemClock(),
        in_use_timeout_s=settings.in_use_timeout_s,
    )
    within_process: dict[str, Any] = {
        "gpus": gpus,
        "allocations": pod_resources.PodResources(str(settings.pod_resources_socket)),
        "processes": simulated_rig.processes,
        "workers_ready": contextlib.nullcontext,
    }
    return main.Agent(
        settings,
        kube,
        boot_id=boot_id,
        overrides=dataclasses.replace(
            overrides or main.Overrides(),
            replace_ports=lambda deps: wrap(
                dataclasses.replace(deps, **within_process | other_ports)
            ),
        ),
    )


class HostedAgent:
    """An agent in a thread of this process, whose client repeats requests without a long pause.

    Args:
        server: The API server.
        token: What the server knows the agent by.
        settings: Of the agent.
        request_timeout_s: How long its client waits for an answer.
        how: The rest of ``new_agent``.
    """

    def __init__(
        self,
        server: apiserver.ApiServer,
        token: str,
        settings: agent_settings.AgentSettings,
        *,
        request_timeout_s: float = 10.0,
        **how: Any,
    ) -> None:
        self._stop = threading.Event()
        self._kube = api.KubeApi.at(
            server.url,
            token=token,
            request_timeout_s=request_timeout_s,
            # Servers ask for whole seconds, and the adapter for fractions: too long here.
            sleep=lambda seconds: self._stop.wait(min(seconds, _MAX_PAUSE_S)),
        )
        self._service = new_agent(settings, self._kube, **how)
        self._thread = threading.Thread(target=self._service.serve, name=token, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the agent end soon."""
        self._stop.set()
        self._service.stop()

    def end(self) -> None:
        """Stop the agent, and wait until it has ended, and its watch with it."""
        self.stop()
        self._thread.join(_STOP_S)
        assert not self._thread.is_alive()
        watching = self._service._watch._thread
        watching.join(_WATCH_END_S)
        assert not watching.is_alive()
        self._kube.close()
