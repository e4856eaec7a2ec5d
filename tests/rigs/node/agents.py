"""Agents on a node in memory: their layouts, what they depend on, and their runs.

- ``run`` applies a layout with an agent that has no past.
- ``start`` has an agent recover what another one left; ``resume`` runs it, too. ``undo`` is for
  a node without a request.
- ``nodes.at_rest`` has an agent after its run, for checks of drift.
- ``repairs.begun`` has one whose check of drift begins a repair, and ``repairs.serve`` plays the
  whole loop from the start to this repair.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager.agent import (
    agent_settings,
    attempt_series,
    attempts,
    layout_request,
    node_context,
    outcomes,
    publish,
    reconcile,
)
from mig_manager.agent.drift import actions
from mig_manager.core import ports
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node.daemons import client_table
from mig_manager.core.objects import well_known
from tests.rigs import layout_table
from tests.rigs.node import fake_cluster, fake_host, fakes, node_rig, unrestored

LAYOUTS_TEXT = (
    layout_table.document(("all-disabled", "all-1g.5gb", "all-balanced", "one-slice-changed"))
    + """\
  all-disabled-first:
  - {devices: [0], mig-enabled: false}
  too-much:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 8}}
  no-such-profile:
  - {devices: all, mig-enabled: true, mig-devices: {1g.99gb: 1}}
  other-gpu:
  - {devices: all, device-filter: "0xFFFF10DE", mig-enabled: true, mig-devices: {1g.5gb: 1}}
"""
)


TIMEOUTS = {
    "drain_timeout_s": 20,
    "plugin_timeout_s": 20,
    "monitor_timeout_s": 5,
    "lock_timeout_s": 3,
}


def _dependencies(rig: node_rig.NodeRig, layouts: str = LAYOUTS_TEXT) -> ports.Dependencies:
    """Return the dependencies of an agent on the node."""
    machine, gpus = fake_host.FakeHost(rig), fake_host.FakeGpus(rig)
    labels = unrestored.deploy_labels(rig.node_object.labels)
    if not rig.owner.deploy_labels and well_known.PAUSED_VALUE not in labels.values():
        rig.owner.deploy_labels = labels
    return ports.Dependencies(
        gpus=gpus,
        node=fake_cluster.FakeNode(rig),
        workloads=fake_cluster.FakeWorkloads(rig),
        allocations=fake_cluster.FakeAllocations(rig),
        slices=fake_cluster.FakeSlices(rig),
        layout_source=fakes.FakeTextSource(layouts),
        clock=rig.clock,
        extra_clients=lambda: (
            client_table.parse(rig.owner.extra_clients, source="test.yaml")
            if rig.owner.extra_clients
            else ()
        ),
        lock=fakes.FakeLock(),
        pod_watch=fakes.FakePodWatch(),
        processes=gpus.processes,
        slots=fake_cluster.FakeSlots(rig) if rig.slots.are_limited else None,
        boot_id=rig.host.boot_id,
        reset=machine if rig.resets.are_available else None,
        reboot=machine if rig.host.may_reboot else None,
        services=machine if rig.host.services else None,
        service_names=lambda: tuple(rig.host.services),
        refresh_files=machine.refresh,
        verified_layout_file=rig.verified_layout_file,
        host_copy_file=rig.host_copy_file,
        hooks=fake_host.FakeHooks(rig) if rig.hooks.text else None,
        own_pod_uid="uid-of-the-agent",
    )


def new_attempt(
    rig: node_rig.NodeRig,
    layout: str,
    settings: agent_settings.RunSettings,
    cancel: ports.Cancellation,
    **overrides: Any,
) -> attempts.Attempt:
    """Return an attempt at a layout, for a part of a run; ``overrides`` as for ``new_agent``."""
    deps = dataclasses.replace(_dependencies(rig), **overrides)
    publisher = publish.Publisher(deps.node, deps.host_copy_file)
    context = node_context.NodeContext(deps=deps, settings=settings, publisher=publisher)
    request = layout_request.Request(layout=layout)
    series = attempt_series.AttemptSeries(context, lambda _gpus: None)
    with series.start_attempt(request, cancel) as attempt:
        return attempt


class AgentInMemory(reconcile.Reconciler):
    """An agent that also takes a request as the layout's name, and options one by one."""

    def __init__(self, deps: ports.Dependencies, settings: agent_settings.RunSettings) -> None:
        super().__init__(deps, settings)
        self.outcomes: list[outcomes.Outcome] = []
        """Of its runs, those that ended."""

    def recover(
        self,
        request: layout_request.Request | str | None,
        custom: custom_layouts.CustomRequest | None = None,
    ) -> None:
        super().recover(_as_request(request, custom))
        assert self.is_current, "its readiness probe would fail"

    def run(
        self,
        request: layout_request.Request | str,
        cancel: ports.Cancellation,
        options: layout_request.AttemptOptions = layout_request.DEFAULT_OPTIONS,
        custom: custom_layouts.CustomRequest | None = None,
        **members: Any,
    ) -> outcomes.Outcome:
        options = dataclasses.replace(options, **members)
        outcome = super().run(_as_request(request, custom), cancel, options)
        # The agent reports every other exception as its own bug, and restores the node.
        assert "AssertionError" not in outcome.message, f"a rule of a fake: {outcome.message}"
        self.outcomes.append(outcome)
        return outcome

    def check_drift(
        self,
        request: layout_request.Request | str,
        outcome: outcomes.Outcome,
        custom: custom_layouts.CustomRequest | None = None,
    ) -> actions.Action:
        return super().check_drift(_as_request(request, custom), outcome)


def _as_request(
    request: layout_request.Request | str | None, custom: custom_layouts.CustomRequest | None
) -> layout_request.Request:
    if isinstance(request, layout_request.Request):
        return request
    return layout_request.Request(layout=request or "", custom=custom)


def new_agent(
    rig: node_rig.NodeRig,
    *,
    layouts: str = LAYOUTS_TEXT,
    heals_drift: bool = False,
    is_lenient: bool = False,
    settings: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> AgentInMemory:
    """Return an agent that has not started yet.

    Args:
        rig: Its node.
        layouts: The text of its layout file.
        heals_drift: Whether it restores the layout after a drift.
        is_lenient: Whether it warns where mig-parted ignores an error in the file.
        settings: Further settings by name.
        overrides: Dependencies other than the node's own.
    """
    return AgentInMemory(
        dataclasses.replace(_dependencies(rig, layouts), **overrides),
        agent_settings.RunSettings(
            heals_drift=heals_drift,
            is_lenient=is_lenient,
            policy=rig.owner.policy,
            **({**TIMEOUTS, **(settings or {})}),
        ),
    )


def start(
    rig: node_rig.NodeRig,
    layout: str | None,
    *,
    layouts: str = LAYOUTS_TEXT,
    custom: custom_layouts.CustomRequest | None = None,
    **options: Any,
) -> AgentInMemory:
    """Return an agent that has just started, with a layout or without one.

    It has recovered what another agent left; ``options`` as for ``new_agent``.
    """
    agent = new_agent(rig, layouts=layouts, **options)
    agent.recover(layout, custom)
    return agent


def run(
    rig: node_rig.NodeRig,
    layout: str,
    *,
    layouts: str = LAYOUTS_TEXT,
    by: AgentInMemory | None = None,
    cancel: fakes.FakeCancellation | None = None,
    **options: Any,
) -> outcomes.Outcome:
    """Apply a layout, with an agent of its own if none is given."""
    agent = by or new_agent(rig, layouts=layouts)
    return agent.run(layout, cancel or fakes.FakeCancellation(rig.clock), **options)


def resume(rig: node_rig.NodeRig, layout: str, *, layouts: str = LAYOUTS_TEXT) -> outcomes.Outcome:
    """Take over from a killed agent, and apply a layout."""
    return run(rig, layout, by=start(rig, layout, layouts=layouts))


def undo(rig: node_rig.NodeRig) -> bool:
    """Take over from a killed agent where the label was removed; return whether to retry."""
    return start(rig, None).restore_without_request()


def take_over(rig: node_rig.NodeRig, layout: str | None) -> None:
    """Take over from a killed agent, with a layout or without one."""
    if layout is None:
        undo(rig)
    else:
        resume(rig, layout)
