"""Wait for a slot, resolve the requested layout, observe the GPUs, and plan the steps between."""

import random
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import record, served_layouts, settings
from mig_manager.core import messages, model, ports, steps, timing, yaml_tree
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import clients
from mig_manager.core.planner import planner
from mig_manager.core.records import requests

_SLOT_BACKOFF = timing.Backoff(first_s=0.25, max_s=10.0)
"""Quick enough where many nodes wait, because each asks at a random time."""
_ABOUT_FILE = frozenset({errors.Reason.INVALID_CONFIG, errors.Reason.UNKNOWN_CONFIG})
_PUBLISH_AGAIN_S = 60.0
"""Hundreds of nodes may wait: each publishes which nodes have the slots only so often."""

_log = structlog.get_logger()


class Planning:
    """The first steps of one run."""

    def __init__(
        self, deps: ports.Dependencies, limits: settings.Limits, written: record.Record
    ) -> None:
        self._deps = deps
        self._limits = limits
        self._record = written
        self._observed: model.ObservedGpus | None = None
        """The GPUs as observed to generate a layout, for the step that observes them."""
        self._warnings: tuple[yaml_tree.Diagnostic, ...] = ()
        self._is_owners = False

    @property
    def gpus(self) -> model.ObservedGpus:
        """The GPUs as observed; none before."""
        return self._record.gpus

    def wait_for_slot(self, request: ports.Cancellation) -> None:
        """Take a slot where their number is limited; before the lock, because it may take long.

        Raises:
            ClusterError: The API refused the request as such, or a status.
            Superseded: Another layout is requested, or the agent stops.
        """
        slots, clock = self._deps.slots, self._deps.clock
        if slots is None:
            return
        if self._record.journal.blocks_workloads:
            try:
                denial = slots.take()
            except errors.ClusterError as error:
                denial = error.message
            if denial:
                _log.warning("slot_not_taken_again", why=denial)
            return
        if self._record.journal.is_restored:
            try:
                if self.plan(self.resolve(), self.observe()).is_empty:
                    return
            except errors.MigManagerError:
                # The run itself reports the error before it disturbs any pod.
                return
        published, published_at_s = "", 0.0
        attempt = 0
        while denial := _try_slot(slots):
            now_s = clock.monotonic()
            may_publish = not published or now_s - published_at_s >= _PUBLISH_AGAIN_S
            if denial != published and may_publish:
                published, published_at_s = denial, now_s
                self._record.enter(model.Phase.WAIT, denial, reason=errors.Reason.SLOTS_TAKEN)
            # A random pause, so that waiting nodes do not ask at the same time.
            spread = random.uniform(0.5, 1.0)  # noqa: S311 - a spread
            request.wait(_SLOT_BACKOFF.delay_s(attempt) * spread)
            attempt += 1

    def resolve(self) -> config.Layout:
        """Return the requested layout.

        Raises:
            ConfigError: The file or annotation cannot be read or is invalid.
            HardwareError: The layout must be generated, and no GPU can be observed.
            LayoutError: There is no such layout, or annotation.
        """

        def observe() -> model.ObservedGpus:
            self._observed = None
            self._observed = self.observe()
            return self._observed

        if custom := self._record.custom:
            layout, self._warnings = custom.layout(is_lenient=self._limits.is_lenient)
            self._is_owners = True
        else:
            layout = self._find(observe)
        self._record.is_owners = self._is_owners
        before = self._record.request
        self._record.note(config_hash=layout.content_hash, origin=layout.origin)
        if not (self.is_for(before) or self._record.journal.rebooted_from):
            self._record.note(is_rebooted=False)
        return layout

    def _find(self, observe: Callable[[], model.ObservedGpus]) -> config.Layout:
        """Return the layout of the file, or a generated one; report whether the file has it."""
        name, is_usable = self._record.config, False
        try:
            layout, self._warnings = served_layouts.find(
                name, self._deps.configs, self._limits, observe
            )
            self._is_owners = not (layout.is_generated or self._limits.has_default_layouts)
            verified = self._record.requests.current.verified
            is_other = verified is not None and verified.config_hash != layout.content_hash
            if verified and verified.is_owners and is_other and not self._is_owners:
                raise errors.LayoutError(
                    f"{self._deps.configs.name} no longer has layout '{name}', which was applied; "
                    "a generated layout of that name is not applied without a new request",
                    reason=errors.Reason.UNKNOWN_CONFIG,
                )
            is_usable = True
        finally:
            self._deps.telemetry.config_read(is_usable=is_usable)
        return layout

    def observe_kept(self, error: errors.MigManagerError) -> model.ObservedGpus:
        """Return the GPUs if they have the verified layout, which the file lacks now.

        Every node with that file would be ``failed`` for a typo, although its layout is active.

        Raises:
            MigManagerError: ``error``, unless it is about the file and the layout is active.
        """
        verified = self._record.requests.current.verified
        is_about_file = error.reason in _ABOUT_FILE and self._record.custom is None
        is_at_rest = self._record.journal.is_restored
        if not (is_about_file and is_at_rest and verified and verified.gpus):
            raise error
        gpus = self.observe()
        if requests.fingerprint(gpus) != verified.gpus:
            raise error
        self._record.is_owners = verified.is_owners
        self._record.note(config_hash=verified.config_hash, config_problem=error.message)
        _log.warning("config_not_used", reason=error.reason.value, error=error.message)
        message = f"{messages.ended(error.message)} {error.reason.remedy}"
        self._deps.node.emit(reason=error.reason.value, message=message, is_warning=True)
        return gpus

    def is_verified(self) -> bool:
        """Check whether the resolved layout was verified, and nothing was requested since.

        New content is a new request, so what was verified before does not count any more.
        """
        asked = self._record.requests
        verified = asked.current.verified
        if verified is None:
            return False
        if verified.config_hash != self._record.request[1]:
            asked.outdate()
        if self.is_for((self._record.config, verified.config_hash)):
            return True
        asked.supersede()
        return False

    def is_for(self, earlier: tuple[str, str]) -> bool:
        """Check whether an earlier request, as name and hash, is that of the resolved layout.

        Content counts only if the owner wrote it. Other content changes without a request: with
        the program, the driver, and the GPUs that are reachable.
        """
        name, content_hash = self._record.request
        is_same = not self._is_owners or earlier[1] in ("", content_hash)
        return earlier[0] == name and is_same

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
        if self._observed is not None:
            gpus, self._observed = self._observed, None
            return gpus
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
        for remark in (*self._warnings, *layouts.lenient_warnings(layout, gpus)):
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

        ``restoring`` is what GPUs outside the layout had before an interrupted change of them.
        Devices whose UUIDs are ``busy`` are destroyed last.

        Raises:
            LayoutError: The layout is impossible on these GPUs; has the location in the file.
        """
        with layouts.located(layout, gpus):
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


def _try_slot(slots: ports.Slots) -> str:
    try:
        return slots.take()
    except errors.ClusterError as error:
        if error.reason is errors.Reason.FORBIDDEN:
            raise
        _log.warning("slots_unknown", reason=error.reason.value, error=error.message)
        return f"waiting for a slot for nodes under change: {error.message}"
