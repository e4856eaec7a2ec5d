"""One agent process of the soak: the real pipeline over ports that a script listens to."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, cast

from mig_manager import errors, lookout, reconcile
from mig_manager.core import cluster, model
from tests import fakes
from tests.soak import cluster as soak_cluster
from tests.soak import driver, script

_PATIENCE = 12
"""Tries in a row that an agent gets, because faults strike once and then the API works."""


class End(enum.Enum):
    """How somebody ends a wish in the middle of a run."""

    REPLACED = "another layout is wanted"
    REMOVED = "the label is removed"
    STOPPED = "the agent is told to stop"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The end of a wish at the n-th time that the run asks."""

    at: int
    end: End
    replacement: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What became of one turn of the agent's loop."""

    is_killed: bool
    outcome: reconcile.Outcome | None
    """None: there was no wish, or it ended, or the process did."""
    names: tuple[str, ...]
    """Layouts of the runs, in order."""


class Process:
    """Does with the pipeline what ``agent.Agent`` does, one try after the other."""

    def __init__(
        self, world: soak_cluster.Cluster, configs: fakes.FakeConfig, *, heals: bool
    ) -> None:
        self._world = world
        self._library = driver.Library(
            world.state,
            on_change=world.script.before_change,
            on_gone=world.destroyed,
            on_changed=world.script.after_change,
        )
        driver.load(self._library)
        self._pipeline = _pipeline(world, configs, heals=heals)
        self._is_recovered = False
        self._is_stopped = False
        self._attempt = 0
        self._names: list[str] = []
        self._tried: str | None = None
        self._ended: reconcile.Outcome | None = None

    def turn(
        self, events: Sequence[script.Event] = (), ending: Interruption | None = None
    ) -> Turn:
        """Serve the label once; until it is told, as the agent does when the API is away."""
        self._world.script.begin(events)
        self._names.clear()
        try:
            return self._turn(ending)
        except script.Killed:
            return Turn(is_killed=True, outcome=None, names=tuple(self._names))
        finally:
            self._world.script.end()

    def look(self) -> Turn:
        """Look at the GPUs as the agent does at rest, and do what is due then."""
        self._names.clear()
        name = self._world.labels.get(cluster.CONFIG_LABEL)
        ended, outcome = self._ended, self._ended
        if name is not None and ended is not None and name == self._tried:
            match self._pipeline.look(name, ended):
                case lookout.Next.REST:
                    pass
                case lookout.Next.HEAL:
                    outcome = self._try(None, spares=True)
                case lookout.Next.RUN:
                    outcome = self._try(None)
        return Turn(is_killed=False, outcome=outcome, names=tuple(self._names))

    def _turn(self, ending: Interruption | None) -> Turn:
        for _ in range(_PATIENCE):
            try:
                outcome = self._try(ending)
            except errors.ClusterError:
                self._is_recovered = False
                continue
            except errors.Superseded:
                assert ending is not None
                self._obey(ending)
                if self._is_stopped:
                    break
                ending = None
                continue
            return Turn(is_killed=False, outcome=outcome, names=tuple(self._names))
        else:
            raise AssertionError("the API answers, and still nothing can be published")
        return Turn(is_killed=False, outcome=None, names=tuple(self._names))

    def _try(
        self, ending: Interruption | None, *, spares: bool = False
    ) -> reconcile.Outcome | None:
        self._ended = None
        name = self._world.labels.get(cluster.CONFIG_LABEL)
        if not self._is_recovered:
            self._pipeline.recover(name)
            self._is_recovered = True
        if name is None:
            self._pipeline.rest()
            return None
        self._attempt = self._attempt + 1 if name == self._tried else 1
        self._tried = name
        self._names.append(name)
        wish = fakes.FakeWish(
            self._world.clock,
            ends_at=ending.at if ending else None,
            replaced=ending is not None and ending.end is End.REPLACED,
        )
        outcome = self._pipeline.run(name, wish, attempt=self._attempt, spares=spares)
        if not outcome.should_retry:
            self._ended = outcome
        return outcome

    def _obey(self, ending: Interruption) -> None:
        match ending.end:
            case End.REPLACED:
                self._world.labels[cluster.CONFIG_LABEL] = ending.replacement
            case End.REMOVED:
                self._world.labels.pop(cluster.CONFIG_LABEL, None)
            case End.STOPPED:
                self._is_stopped = True


def state_of(world: soak_cluster.Cluster) -> model.State | None:
    """Return what the node says."""
    text = world.labels.get(cluster.STATE_LABEL)
    return model.State(text) if text else None


def _pipeline(
    world: soak_cluster.Cluster, configs: fakes.FakeConfig, *, heals: bool
) -> reconcile.Reconciler:
    ports: dict[str, object] = {
        "gpus": driver.real_adapter(world.clock),
        "node": world.node,
        "workloads": soak_cluster.Workloads(world),
        "allocations": world.allocations,
        "configs": configs,
    }
    heard: dict[str, Any] = {
        name: cast("Any", script.Port(port, name, world.script)) for name, port in ports.items()
    }
    return reconcile.Reconciler(
        reconcile.World(clock=world.clock, boot_id=world.state.boot_id, **heard),
        reconcile.Limits(
            drain_timeout_s=6.0,
            plugin_timeout_s=6.0,
            monitor_timeout_s=2.0,
            heals_drift=heals,
        ),
    )
