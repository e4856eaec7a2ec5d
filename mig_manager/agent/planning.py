"""Resolve the requested layout, observe the GPUs, and plan the steps between the two."""

import functools
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, record, run_limits
from mig_manager.core import model, steps, yaml_tree
from mig_manager.core.layout import config, selection
from mig_manager.core.node import clients
from mig_manager.core.planner import planner

_log = structlog.get_logger()

_parsed = functools.lru_cache(maxsize=1)(config.parse)
"""The file seldom changes, and parsing it would take half of the time until ``pending``."""


class Planning:
    """The first steps of one run."""

    def __init__(
        self,
        deps: dependencies.Dependencies,
        limits: run_limits.Limits,
        written: record.Record,
    ) -> None:
        self._deps = deps
        self._is_lenient = limits.is_lenient
        self._record = written
        self._warnings: tuple[yaml_tree.Diagnostic, ...] = ()

    def resolve(self) -> config.Layout:
        """Return the requested layout.

        Raises:
            ConfigError: The file cannot be read or is invalid.
            LayoutError: The file has no such layout.
        """
        source = self._deps.configs
        document = _parsed(source.read(), source=source.name, is_lenient=self._is_lenient)
        layout = document.layout(self._record.config)
        self._warnings = document.warnings
        self._record.note(config_hash=layout.content_hash)
        return layout

    def extra_clients(self) -> tuple[clients.ExtraClient, ...]:
        """Return the GPU clients beside NVIDIA's.

        Raises:
            ConfigError: The file cannot be read or is invalid.
        """
        source = self._deps.extra_clients
        return clients.parse(source.read(), source=source.name) if source else ()

    def observe(self) -> model.ObservedGpus:
        """Observe the GPUs.

        Raises:
            HardwareError: No GPU can be observed; from the second attempt on the message says so.
        """
        try:
            gpus = self._deps.gpus.observe()
        except errors.HardwareError as error:
            if self._record.attempt > 1:
                error.add(f"no GPU can be observed at attempt {self._record.attempt} either")
            raise
        self._record.note(gpus=gpus)
        return gpus

    def warn(self, layout: config.Layout, gpus: model.ObservedGpus) -> None:
        """Log the problems that lenient parsing accepts."""
        for remark in (*self._warnings, *selection.lenient_warnings(layout, gpus)):
            _log.warning("config_overlooked", place=str(remark.location), problem=remark.message)

    def plan(
        self,
        layout: config.Layout,
        gpus: model.ObservedGpus,
        *,
        restoring: Sequence[model.GpuSnapshot] = (),
        busy: frozenset[str] = frozenset(),
    ) -> steps.Plan:
        """Plan the layout.

        Args:
            layout: The layout.
            gpus: The GPUs as observed.
            restoring: What GPUs outside the layout had before an interrupted change of them.
            busy: UUIDs of devices in use, which are destroyed last.

        Raises:
            LayoutError: The layout is impossible on these GPUs; has the location in the file.
        """
        with selection.located(layout, gpus):
            plan = planner.plan(gpus, config.select(layout, gpus), busy=busy)
            return planner.combined(plan, planner.restore(gpus, restoring))

    def expects_change(self, layout: config.Layout, remembered: model.ObservedGpus) -> bool:
        """Check whether the layout changes the GPUs as an earlier run observed them.

        An observation takes a moment, and the label's author should see at once that the agent
        read it. No decision depends on this: the plan is made from a new observation.
        """
        if not remembered:
            return False
        try:
            return not self.plan(layout, remembered).is_empty
        except errors.MigManagerError:
            return False

    def has_changes(self) -> bool:
        """Check whether the run has anything to change, or to resume."""
        if not self._record.journal.is_empty:
            return True
        try:
            return not self.plan(self.resolve(), self.observe()).is_empty
        except errors.MigManagerError:
            # The run itself reports the error before it disturbs any pod.
            return False
