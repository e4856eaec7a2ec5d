"""The ports, settings and memory of one node, which its runs and its drift checks share."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import structlog

from mig_manager import errors
from mig_manager.agent import agent_settings, attempt_memory, publish
from mig_manager.change import layout_store, node_lock
from mig_manager.core import model, ports, timing
from mig_manager.core.layout import layout_documents, layout_parser
from mig_manager.core.settings import node_settings

_log = structlog.get_logger()

_parsed = functools.lru_cache(maxsize=1)(layout_parser.parse)
"""Cache: the file rarely changes, and parsing would take half of the time until ``pending``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The ports, settings and memory of one node, for all attempts on it.

    A function takes it for the settings or the memory; for ports alone it takes ``deps`` or a
    port. It works at rest and without a request. In a run its argument is the attempt, which is
    a context.
    """

    deps: ports.Dependencies
    settings: agent_settings.RunSettings
    publisher: publish.Publisher
    memory: attempt_memory.AttemptMemory = dataclasses.field(
        default_factory=attempt_memory.AttemptMemory
    )

    @property
    def node_labels(self) -> Mapping[str, str]:
        """The node's labels, from the watch if it runs."""
        return self.deps.node.latest().labels

    @property
    def may_repair(self) -> bool:
        """Whether the owner lets the agent reset GPUs with a fault, and it can."""
        is_allowed = self.settings.repair is node_settings.RepairPolicy.RESET
        return is_allowed and self.deps.reset is not None

    @property
    def verified_layout(self) -> layout_store.VerifiedLayoutStore:
        """The verified layout, saved for the next boot."""
        return layout_store.VerifiedLayoutStore(self.deps.verified_layout_file, self.deps.boot_id)

    def layout_file(self) -> layout_documents.Document:
        """Parse the layout file; ConfigError if it cannot be read or is invalid."""
        source, settings = self.deps.layout_source, self.settings
        try:
            return _parsed(source.read(), source=source.name, is_lenient=settings.is_lenient)
        except errors.ConfigError as error:
            if settings.has_default_layouts:
                _log.warning("default_layouts_not_read", error=error.message)
            raise

    def hold_lock(
        self, doing: str, wait: timing.Wait | None = None, *, changes_gpus: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Hold the node's lock in the context; without ``wait``, try once.

        Raises:
            LockedError: On entering: another manager had it until the deadline.
            Superseded: On entering: the wait was interrupted.
        """
        wait = wait or timing.Wait(clock=self.deps.clock)
        return node_lock.hold(self.deps.lock, doing, wait, changes_gpus=changes_gpus)

    def observe(self) -> model.ObservedGpus:
        """Observe the GPUs while no other manager changes them.

        Raises:
            HardwareError: None can be observed.
            LockedError: Another manager is at work.
        """
        with self.hold_lock("observing the GPUs", changes_gpus=False):
            return self.deps.gpus.observe()
