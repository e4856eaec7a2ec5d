"""Which calls fail with the API server, and which never do: of fakes as of adapters."""

from collections.abc import Callable

import pytest

from mig_manager import errors
from mig_manager.core.node import eviction_rules
from mig_manager.core.objects import node_object, pod_object
from mig_manager.core.records import readiness
from tests.adapters.kubernetes.ports.port_rigs import GPU, OTHER, Rig

POD = pod_object.Pod(namespace="default", name="train", uid="u", phase="Running")
BUDGET = eviction_rules.Budget(
    namespace="default", name="guard", selector=(), allowed=0, healthy=0, desired=0
)
PATCH = node_object.NodePatch(labels={"x": "y"})

RAISING: dict[str, Callable[[Rig], object]] = {
    "read": lambda rig: rig.node.read(),
    "latest": lambda rig: rig.node.latest(),
    "patch": lambda rig: rig.node.patch(PATCH),
    "update": lambda rig: rig.node.update(lambda _view: PATCH),
    "remove_resources": lambda rig: rig.node.remove_resources([OTHER]),
    "list": lambda rig: rig.workloads.list(),
    "present": lambda rig: rig.workloads.present(),
    "evict": lambda rig: rig.workloads.evict(POD),
    "can_evict": lambda rig: rig.workloads.can_evict(POD),
    "budgets": lambda rig: rig.workloads.budgets({"default"}),
    "covered_by": lambda rig: rig.workloads.covered_by(BUDGET),
    "delete": lambda rig: rig.workloads.delete(POD),
    "slices": lambda rig: rig.slices.list(),
}
SILENT: dict[str, Callable[[Rig], object]] = {
    "announce": lambda rig: rig.node.announce(PATCH),
    "hide_devices": lambda rig: rig.node.hide_devices(),
    "report_devices": lambda rig: rig.node.report_devices({GPU: 8}),
    "set_condition": lambda rig: rig.node.set_condition(readiness.NO_LAYOUT_REQUESTED),
    "emit": lambda rig: rig.node.emit(reason="Applied", message="yes", is_warning=False),
    "delete": lambda rig: rig.slices.delete(),
    "release": lambda rig: rig.slots.release(),
}


@pytest.mark.parametrize("call", RAISING.values(), ids=RAISING)
def test_failure_of_the_api_is_an_error(rig: Rig, call: Callable[[Rig], object]) -> None:
    rig.fail()

    with pytest.raises(errors.ClusterError) as caught:
        call(rig)
    assert caught.value.may_be_done


@pytest.mark.parametrize("call", SILENT.values(), ids=SILENT)
def test_failure_is_not_raised_where_the_change_goes_on(
    rig: Rig, call: Callable[[Rig], object]
) -> None:
    rig.fail()

    call(rig)

    assert rig.node.flush_events(30)
