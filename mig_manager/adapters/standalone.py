"""A node that belongs to no cluster, for the command line: the ports with nothing behind them."""

from collections.abc import Mapping

import structlog

from mig_manager import errors, ports
from mig_manager.core import cluster

_log = structlog.get_logger()


class StandaloneNode:
    """Implements ``ports.Node`` in memory, so that the pipeline has somewhere to write."""

    def __init__(self) -> None:
        self._view = cluster.NodeView(
            name="localhost",
            uid="",
            labels={},
            annotations={},
            is_unschedulable=False,
            taint_keys=frozenset(),
            allocatable={},
        )

    def read(self) -> cluster.NodeView:
        """Return an empty node."""
        return self._view

    def patch(self, change: cluster.NodePatch) -> cluster.NodeView:
        """Accept and forget: nobody reads this node."""
        return self._view

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Log what would be an Event."""
        _log.info("event", reason=reason, message=message, is_warning=is_warning)


class NoWorkloads:
    """Implements ``ports.Workloads`` where no kubelet runs pods."""

    def list(self) -> tuple[cluster.Pod, ...]:
        """Return no pods."""
        return ()

    def evict(self, pod: cluster.Pod) -> tuple[ports.Eviction, str]:
        """Say that the pod is gone: there never was one."""
        return ports.Eviction.GONE, ""

    def delete(self, pod: cluster.Pod) -> None:
        """Do nothing: there never was one."""


class NoAllocations:
    """Implements ``ports.DeviceAllocations`` where there is no kubelet."""

    def assigned(self) -> tuple[cluster.PodDevices, ...]:
        """Return nothing: no kubelet gives devices away."""
        return ()

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Refuse: nothing is offered to anybody.

        Raises:
            ClusterError: Always.
        """
        raise errors.ClusterError(
            "this node runs no kubelet", reason=errors.Reason.POD_RESOURCES_UNAVAILABLE
        )


class Unconditional:
    """Implements ``ports.Wish`` for a command: it is wanted until it is done."""

    def __init__(self, clock: ports.Clock) -> None:
        self._clock = clock

    def check(self) -> None:
        """Return: nothing supersedes a command."""

    def wait(self, seconds: float) -> None:
        """Sleep through."""
        self._clock.wait(seconds)
