"""A node in memory, and one drain of it."""

from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.agent import agent_settings
from mig_manager.agent.pods import drain, drain_scope
from mig_manager.core import pod_rights
from mig_manager.core.node import gpu_use, policies
from mig_manager.core.node.daemons import client_table
from tests.rigs.node import agents, driver_rules, fake_cluster, fakes, gpu_values
from tests.rigs.node.node_rig import NodeRig

DOOMED = driver_rules.mig_uuid("doomed")


def empty() -> NodeRig:
    return NodeRig(gpus=gpu_values.gpus_of("A100-SXM4-40GB"))


def gpu_pod(rig: NodeRig, name: str = "train", **fields: object) -> str:
    return rig.pods.add(name, devices=frozenset({DOOMED}), **fields)


def new_drain(
    rig: NodeRig,
    *,
    policy: policies.Policy | None = None,
    affected: frozenset[str] = frozenset({DOOMED}),
    cancel: fakes.FakeCancellation | None = None,
    usage: gpu_use.Usage | None = None,
    **overrides: Any,
) -> drain.Drain:
    settings = agent_settings.RunSettings(policy=policy or policies.Policy(), drain_timeout_s=20)
    only_waits = settings.policy.drain is policies.DrainPolicy.NONE
    scope = drain_scope.DrainScope(
        affected=None if settings.policy.drain is policies.DrainPolicy.NODE else affected,
        rights=pod_rights.WaitOnly() if only_waits else pod_rights.Evict(),
    )
    attempt = agents.new_attempt(
        rig,
        "one-slice-changed",
        settings,
        cancel or fakes.FakeCancellation(rig.clock),
        **overrides,
    )
    return drain.Drain.start_or_continue(attempt, scope, usage or usage_of(rig))


def usage_of(rig: NodeRig) -> gpu_use.Usage:
    return gpu_use.Usage(
        assigned=fake_cluster.FakeAllocations(rig).assigned_devices(),
        pods=fake_cluster.FakeWorkloads(rig).list(),
        extra_clients=(client_table.ExtraClient(labels={"app": "watcher"}),),
    )


def evicted_by(draining: drain.Drain) -> int:
    draining.run()
    return draining.evictions.removals.count


def run_drain(rig: NodeRig, **options: Any) -> int:
    return evicted_by(new_drain(rig, **options))


FORCE = policies.Policy(is_forced=True)


def api_error(
    reason: reasons.Reason, status: int | None = None, retry_after_s: float | None = None
) -> errors.ClusterError:
    message = f"the API said {status}"
    return errors.ClusterError(message, reason=reason, status=status, retry_after_s=retry_after_s)


FORBIDDEN = api_error(reasons.Reason.FORBIDDEN, 403)
SILENT = api_error(reasons.Reason.API_UNAVAILABLE, 503)


def drain_to_failure(
    rig: NodeRig, reason: reasons.Reason, text: str = "", **options: Any
) -> errors.MigManagerError:
    """Drain until the deadline; check the reason and a text of the message."""
    begun_s = rig.clock.now_s
    with pytest.raises(errors.MigManagerError) as caught:
        run_drain(rig, **options)
    assert caught.value.reason is reason
    assert text in caught.value.message
    timeout_s = 40 if options.get("policy") is FORCE else 20
    assert timeout_s <= rig.clock.now_s - begun_s < timeout_s + 5
    return caught.value


PASSIVE = policies.Policy(drain=policies.DrainPolicy.NONE)
