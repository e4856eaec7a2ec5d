"""NVML calls of a reconfiguration fail once each with every code of ``nvml_codes``, or hang once.

Struck is of each function the first call for each GPU, the first one after the first look at the
GPUs, and the last one; and every call that changes a GPU. Either the run recovers, or it ends with
the reason that the code stands for, the function and the GPU in its message, the GPUs as they were
and nothing taken; and the next run succeeds. A case counts only if the driver's fault has fired.
"""

import collections
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping

import pytest

from mig_manager import errors
from mig_manager.adapters.nvml import library
from mig_manager.core.node import cluster
from testkit import nvml_faults
from tests import lost_stderr
from tests.faults import nvml_codes, nvml_node
from tests.faults.nvml_codes import (
    IN_USE,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
)

Reason = errors.Reason
Note = Callable[[str, object], None]

BELIEVED: Mapping[tuple[str, int], frozenset[Reason]] = {
    # A look for processes that cannot be made keeps no change off: the driver itself refuses to
    # destroy what is in use.
    **{
        (function, code): frozenset()
        for function in (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetHandleByIndex_v2",
            "nvmlDeviceGetMinorNumber",
            "nvmlDeviceGetUUID",
            "nvmlSystemGetProcessName",
        )
        for code in nvml_codes.codes_of(function)
    },
    # The GPU has no MIG; another one of the node may have.
    ("nvmlDeviceGetMigMode", NOT_SUPPORTED): frozenset(
        {Reason.NOT_MIG_CAPABLE, Reason.NOT_ALLOCATABLE}
    ),
    # The generation of the GPU shows as well whether it must be reset.
    ("nvmlDeviceGetFieldValues", INVALID_ARGUMENT): frozenset(),
    # The GPU has no memory of its own to name profiles by.
    ("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED): frozenset({Reason.NOT_SUPPORTED}),
    # There is no such profile.
    **{
        ("nvmlDeviceGetGpuInstanceProfileInfo", code): frozenset(
            {Reason.UNKNOWN_PROFILE, Reason.VERIFY_FAILED, Reason.IN_USE}
        )
        for code in (NOT_SUPPORTED, INVALID_ARGUMENT)
    },
    **{
        ("nvmlGpuInstanceGetComputeInstanceProfileInfo", code): frozenset(
            {Reason.NOT_SUPPORTED, Reason.VERIFY_FAILED}
        )
        for code in (NOT_SUPPORTED, INVALID_ARGUMENT)
    },
    # The driver reports no profiles while MIG is off, or not to every caller.
    ("nvmlDeviceGetGpuInstanceProfileInfo", NO_PERMISSION): frozenset({Reason.UNKNOWN_PROFILE}),
    ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", NOT_SUPPORTED): frozenset(),
    ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", NO_PERMISSION): frozenset(
        {Reason.UNKNOWN_PROFILE}
    ),
    # There is none of this profile.
    **{
        (function, NOT_FOUND): frozenset(
            {Reason.VERIFY_FAILED, Reason.INSUFFICIENT_RESOURCES, Reason.IN_USE}
        )
        for function in ("nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetComputeInstances")
    },
    # It has gone already.
    ("nvmlDeviceGetGpuInstanceById", NOT_FOUND): frozenset(
        {Reason.IN_USE, Reason.INSUFFICIENT_RESOURCES, Reason.VERIFY_FAILED}
    ),
    ("nvmlGpuInstanceGetComputeInstanceById", NOT_FOUND): frozenset(
        {Reason.IN_USE, Reason.INSUFFICIENT_RESOURCES, Reason.VERIFY_FAILED}
    ),
    # The driver does not report it: the rules of the open kernel modules count.
    **{
        ("nvmlGpuInstanceGetComputeInstancePossiblePlacements", code): frozenset()
        for code in (NOT_SUPPORTED, INVALID_ARGUMENT)
    },
    # There is no MIG device at this index.
    **{
        ("nvmlDeviceGetMigDeviceHandleByIndex", code): frozenset({Reason.NOT_ALLOCATABLE})
        for code in (NOT_FOUND, INVALID_ARGUMENT)
    },
    # This driver can only choose the place itself, and then may choose the right one.
    **{
        (function, NOT_SUPPORTED): frozenset({Reason.NOT_SUPPORTED})
        for function in nvml_codes.CHANGES
        if function.endswith("WithPlacement")
    },
    # It is in use; the process may end.
    **{(function, IN_USE): frozenset() for function in nvml_codes.CHANGES},
}
"""Answers that are taken for what they say, with the reasons that a run may fail with when it is
not so; each of them may also be borne."""

NO_MIG = ("nvmlDeviceGetMigMode", NOT_SUPPORTED)
"""With ``devices: all`` a GPU that says so is left out, and the others have the layout."""

UNSEEN = (
    ("nvmlDeviceGetGpuInstanceProfileInfo", NOT_SUPPORTED),
    ("nvmlDeviceGetGpuInstanceProfileInfo", INVALID_ARGUMENT),
    ("nvmlDeviceGetGpuInstances", NOT_FOUND),
    ("nvmlGpuInstanceGetComputeInstances", NOT_FOUND),
)
"""Answers that hide an instance. What the first read missed blocks the MIG mode change, and
no rollback restores it."""

HUNG_TIMEOUT_S = 4.0
"""Also what a healthy worker may take on a machine that is busy with other tests."""


def strike(
    node: nvml_node.Node, site: nvml_node.Site, fault: nvml_faults.Fault
) -> nvml_node.Ended:
    """Run with one fault, which must have struck, and leave the node as the run leaves it."""
    node.begin()
    node.state.add_fault(fault)
    ended = node.run()
    (armed,) = node.state.faults()
    assert armed.fired == 1, f"{site} was not called"
    node.state.clear_faults()
    return ended


def is_tried_alone(node: nvml_node.Node, site: nvml_node.Site) -> bool:
    """Check whether a call that fails beside other GPUs is made once more without them."""
    return node.scenario.name == "first-on-two" and site.function == "nvmlDeviceSetMigMode"


def check_reason(site: nvml_node.Site, code: int, ended: nvml_node.Ended) -> None:
    reason, message = ended.outcome.reason, ended.outcome.message
    believed = BELIEVED.get((site.function, code))
    if believed is not None and (ended.is_good or reason in believed):
        return
    assert not ended.is_good, "nothing says that this may be borne"
    assert reason is library.from_code(code, operation="").reason
    assert site.operation in message
    if site.gpu is not None:
        assert f"GPU {site.gpu}" in message


def check_gpus(
    node: nvml_node.Node, site: nvml_node.Site, code: int, ended: nvml_node.Ended
) -> None:
    what, reason = (site.function, code), ended.outcome.reason
    if ended.is_good:
        assert what == NO_MIG or node.shape() == node.after
    elif reason is Reason.NOT_ALLOCATABLE:
        # The change was verified on the GPUs, or there was none.
        assert node.shape() in (node.before, node.after)
    else:
        is_unseen = reason is Reason.IN_USE and what in UNSEEN
        assert is_unseen or node.shape() == node.before


def play(node: nvml_node.Node, site: nvml_node.Site, code: int) -> str:
    """Have one call fail once; return how the run ended."""
    fault = nvml_faults.Fault(function=site.function, gpu=site.gpu, first=site.nth, code=code)
    ended = strike(node, site, fault)
    assert ended.tracebacks == []
    # What the change did not see at first is kept, and with it the journal until all is right.
    is_unseen = (site.function, code) in UNSEEN
    assert node.taken() in ([], [cluster.JOURNAL_ANNOTATION] if is_unseen else [])
    if not (ended.is_good and is_tried_alone(node, site)):
        check_reason(site, code, ended)
    check_gpus(node, site, code, ended)
    assert node.run().is_good
    assert node.shape() == node.after
    assert node.taken() == []
    return "Recovered" if ended.is_good else ended.outcome.reason.value


def play_all(
    note: Note, node: nvml_node.Node, cases: Iterable[tuple[nvml_node.Site, int]], *, section: str
) -> None:
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    tried = 0
    for site, code in cases:
        tried += 1
        try:
            counts[play(node, site, code)] += 1
        except AssertionError as error:
            failures.append(f"{site}, {nvml_codes.name_of(code)}: {error}")
    note(
        section,
        {
            "scenario": node.scenario.name,
            "tried": tried,
            "struck": counts.total(),
            "ends": dict(sorted(counts.items())),
        },
    )
    assert failures == []
    assert counts.total() == tried > 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", nvml_node.SCENARIOS, ids=lambda scenario: scenario.name)
def test_any_call_may_fail_once_with_any_code_and_the_node_is_none_the_worse(
    scenario: nvml_node.Scenario, tmp_path: pathlib.Path, record_property: Note
) -> None:
    with nvml_node.prepared(scenario, tmp_path / "state") as node:
        sites = node.record()
        play_all(
            record_property,
            node,
            ((s, code) for s in sites for code in nvml_codes.codes_of(s.function)),
            section="NVML faults",
        )


def test_every_change_may_fail_once_and_the_node_is_none_the_worse(
    tmp_path: pathlib.Path, record_property: Note
) -> None:
    scenario = next(each for each in nvml_node.SCENARIOS if each.name == "one-slice")
    with nvml_node.prepared(scenario, tmp_path / "state") as node:
        changes = [site for site in node.record() if site.function in nvml_codes.CHANGES]
        play_all(
            record_property,
            node,
            ((site, nvml_codes.UNKNOWN) for site in changes),
            section="NVML faults, a sample",
        )


WAYS = ("full-disk", "closed-pipe", "stalled-reader")


def play_with_lost_log(
    note: Note, node: nvml_node.Node, cases: Iterable[tuple[nvml_node.Site, int]], *, section: str
) -> None:
    """Play cases with a good log and with one that loses every line; both must end alike."""
    good, tried, struck = node.listen, 0, 0
    lost: collections.Counter[str] = collections.Counter()
    for (site, code), way in zip(cases, itertools.cycle(WAYS), strict=False):
        fault = nvml_faults.Fault(function=site.function, gpu=site.gpu, first=site.nth, code=code)
        before, ends = lost.total(), []
        for listen in (good, functools.partial(lost_stderr.logging_lost, way, lost)):
            node.listen = listen
            ended = strike(node, site, fault)
            ends.append((ended.outcome, node.taken(), node.shape()))
        tried += 1
        struck += lost.total() > before
        assert ends[0] == ends[1], f"{site}, {nvml_codes.name_of(code)}, {way}"
    node.listen = good
    note(
        section,
        {
            "scenario": node.scenario.name,
            "tried": tried,
            "struck": struck,
            "lines lost": dict(sorted(lost.items())),
        },
    )
    assert struck == tried > 0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", nvml_node.SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_run_that_fails_anywhere_ends_as_with_a_good_log_where_every_line_is_lost(
    scenario: nvml_node.Scenario, tmp_path: pathlib.Path, record_property: Note
) -> None:
    with nvml_node.prepared(scenario, tmp_path / "state") as node:
        play_with_lost_log(
            record_property,
            node,
            ((s, code) for s in node.record() for code in nvml_codes.codes_of(s.function)),
            section="Lost logs",
        )


def test_a_change_that_fails_ends_as_with_a_good_log_where_every_line_is_lost(
    tmp_path: pathlib.Path, record_property: Note
) -> None:
    scenario = next(each for each in nvml_node.SCENARIOS if each.name == "one-slice")
    with nvml_node.prepared(scenario, tmp_path / "state") as node:
        changes = [site for site in node.record() if site.function in nvml_codes.CHANGES]
        play_with_lost_log(
            record_property,
            node,
            ((site, nvml_codes.UNKNOWN) for site in changes),
            section="Lost logs, a sample",
        )


HUNG = (
    ("first-on-ampere", "nvmlInitWithFlags"),
    ("first-on-ampere", "nvmlDeviceGetUUID"),
    ("first-on-ampere", "nvmlDeviceSetMigMode"),
    ("first-on-ampere", "nvmlDeviceCreateGpuInstanceWithPlacement"),
    ("one-slice", "nvmlComputeInstanceDestroy"),
    ("one-slice", "nvmlGpuInstanceDestroy"),
    ("one-slice", "nvmlGpuInstanceCreateComputeInstance"),
    ("one-slice", "nvmlShutdown"),
    ("inside", "nvmlGpuInstanceCreateComputeInstanceWithPlacement"),
)


def play_hung(name: str, function: str, path: pathlib.Path) -> None:
    scenario = next(each for each in nvml_node.SCENARIOS if each.name == name)
    with nvml_node.prepared(scenario, path) as node:
        sites = [site for site in node.record() if site.function == function]
        node.put_child_before_gpus(timeout_s=HUNG_TIMEOUT_S)
        for site in dict.fromkeys((sites[0], sites[-1])):
            ended = strike(
                node,
                site,
                nvml_faults.Fault(function=function, gpu=site.gpu, first=site.nth, hang_s=600),
            )
            assert ended.outcome.reason is Reason.NVML_TIMEOUT, site
            assert ended.tracebacks == []
            assert node.taken() == []
            assert node.shape() == node.before
            assert node.run().is_good
            assert node.shape() == node.after


@pytest.mark.slow
@pytest.mark.parametrize(("name", "function"), HUNG)
def test_a_call_that_hangs_is_given_up_and_the_change_undone(
    name: str, function: str, tmp_path: pathlib.Path
) -> None:
    play_hung(name, function, tmp_path / "state")
