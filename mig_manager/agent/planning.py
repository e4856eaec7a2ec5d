"""From a wish's name to a plan, for a run of the agent: read, resolve, observe, plan."""

import functools
from collections.abc import Mapping

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, record
from mig_manager.core import model, steps, yaml_tree
from mig_manager.core.layout import config, selection
from mig_manager.core.node import clients
from mig_manager.core.planner import planner

Gpus = model.ObservedGpus

_log = structlog.get_logger()

_parsed = functools.lru_cache(maxsize=1)(config.parse)
"""The file seldom changes, and to read it again would be half of the time until ``pending``."""


class Planning:
    """What one run knows of its wish.

    Args:
        world: What it reaches.
        limits: What it may do.
        written: What is published of the run; told of hash and GPUs.
        name: The layout, as the label names it.
    """

    def __init__(
        self,
        world: dependencies.Dependencies,
        limits: dependencies.Limits,
        written: record.Record,
        *,
        name: str,
    ) -> None:
        self._world = world
        self._is_lenient = limits.is_lenient
        self._record = written
        self._name = name
        self._warnings: tuple[yaml_tree.Diagnostic, ...] = ()
        self._others: tuple[model.GpuSnapshot, ...] = ()

    def resolve(self) -> config.Layout:
        """Read the layout.

        Raises:
            ConfigError: The file cannot be read or breaks the format.
            LayoutError: It has no such layout.
        """
        source = self._world.configs
        document = _parsed(source.read(), source=source.name, is_lenient=self._is_lenient)
        layout = document.layout(self._name)
        self._record.note(config_hash=layout.content_hash)
        self._warnings = document.warnings
        return layout

    def extra_clients(self) -> tuple[clients.ExtraClient, ...]:
        """Read the table of the owner's other GPU daemons.

        Raises:
            ConfigError: The file cannot be read or breaks the format.
        """
        source = self._world.extra_clients
        return clients.parse(source.read(), source=source.name) if source else ()

    def warn(self, layout: config.Layout, gpus: Gpus) -> None:
        """Say what passed because the document is read leniently."""
        for remark in (*self._warnings, *selection.lenient_warnings(layout, gpus)):
            _log.warning("config_overlooked", place=str(remark.location), problem=remark.message)

    def observe(self) -> Gpus:
        """Look at the GPUs.

        Raises:
            HardwareError: They cannot be observed; says at which attempt, from the second on.
        """
        try:
            gpus = self._world.gpus.observe()
        except errors.HardwareError as error:
            if self._record.attempt > 1:
                error.add(f"no GPU can be observed at attempt {self._record.attempt} either")
            raise
        self._record.note(gpus=gpus)
        return gpus

    def take_along(self, others: tuple[model.GpuSnapshot, ...]) -> None:
        """Have every plan bring back GPUs that the layout is not about.

        Args:
            others: What they had before an interrupted change touched them.
        """
        self._others = others

    def plan(
        self,
        gpus: Gpus,
        wanted: Mapping[str, model.DesiredGpu],
        *,
        busy: frozenset[str] = frozenset(),
    ) -> steps.Plan:
        """Plan the wish, and the way back of what is taken along.

        Raises:
            LayoutError: It cannot be had on these GPUs.
        """
        plan = planner.plan(gpus, wanted, busy=busy)
        return planner.combined(plan, planner.restore(gpus, self._others))

    def alone(self, layout: config.Layout, gpus: Gpus) -> steps.Plan:
        """Plan the layout and nothing beside it.

        Raises:
            LayoutError: It cannot be had on these GPUs; the message has the place in the file.
        """
        with selection.located(layout, gpus):
            return planner.plan(gpus, config.select(layout, gpus))

    def foresees_change(self, layout: config.Layout, remembered: Gpus) -> bool:
        """Tell whether GPUs are going to be changed, by what is remembered of them.

        To look at them takes a moment; whoever has set the label shall see that it was read.
        Nothing is decided by this: what is planned is planned from a fresh look.

        Args:
            layout: The wish.
            remembered: The GPUs as an earlier run saw them last; none: there was no such run.
        """
        if not remembered:
            return False
        try:
            return not self.alone(layout, remembered).is_empty
        except errors.MigManagerError:
            return False

    def is_anything_due(self) -> bool:
        """Tell whether the run has anything to change, or to carry on with."""
        if not self._record.journal.is_empty:
            return True
        try:
            return not self.alone(self.resolve(), self.observe()).is_empty
        except errors.MigManagerError:
            # The run itself will say it, and as long as it lasts nobody is hurt.
            return False
