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
from collections.abc import Callable, Iterator, Mapping, Sequence

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
Cases = Sequence[tuple[nvml_node.Site, int]]

_LOST_INSTANCE = (Reason.IN_USE, Reason.INSUFFICIENT_RESOURCES, Reason.VERIFY_FAILED)
_ANY: tuple[int, ...] = ()
_BELIEVED: tuple[tuple[tuple[str, ...], tuple[int, ...], tuple[Reason, ...]], ...] = (
    # A look for processes that cannot be made keeps no change off: the driver itself refuses to
    # destroy what is in use.
    (
        (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetHandleByIndex_v2",
            "nvmlDeviceGetMinorNumber",
            "nvmlDeviceGetUUID",
            "nvmlSystemGetProcessName",
        ),
        _ANY,
        (),
    ),
    # The GPU has no MIG; another one of the node may have.
    (
        ("nvmlDeviceGetMigMode",),
        (NOT_SUPPORTED,),
        (Reason.NOT_MIG_CAPABLE, Reason.NOT_ALLOCATABLE),
    ),
    # The generation of the GPU shows as well whether it must be reset.
    (("nvmlDeviceGetFieldValues",), (INVALID_ARGUMENT,), ()),
    # The GPU has no memory of its own to name profiles by.
    (("nvmlDeviceGetMemoryInfo",), (NOT_SUPPORTED,), (Reason.NOT_SUPPORTED,)),
    # There is no such profile.
    (
        ("nvmlDeviceGetGpuInstanceProfileInfo",),
        (NOT_SUPPORTED, INVALID_ARGUMENT),
        (Reason.UNKNOWN_PROFILE, Reason.VERIFY_FAILED, Reason.IN_USE),
    ),
    (
        ("nvmlGpuInstanceGetComputeInstanceProfileInfo",),
        (NOT_SUPPORTED, INVALID_ARGUMENT),
        (Reason.NOT_SUPPORTED, Reason.VERIFY_FAILED),
    ),
    # The driver reports no profiles while MIG is off, or not to every caller.
    (
        (
            "nvmlDeviceGetGpuInstanceProfileInfo",
            "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        ),
        (NO_PERMISSION,),
        (Reason.UNKNOWN_PROFILE,),
    ),
    (("nvmlDeviceGetGpuInstancePossiblePlacements_v2",), (NOT_SUPPORTED,), ()),
    # There is none of this profile, or it has gone already.
    (
        (
            "nvmlDeviceGetGpuInstances",
            "nvmlGpuInstanceGetComputeInstances",
            "nvmlDeviceGetGpuInstanceById",
            "nvmlGpuInstanceGetComputeInstanceById",
        ),
        (NOT_FOUND,),
        _LOST_INSTANCE,
    ),
    # The driver does not report it: the rules of the open kernel modules count.
    (
        ("nvmlGpuInstanceGetComputeInstancePossiblePlacements",),
        (NOT_SUPPORTED, INVALID_ARGUMENT),
        (),
    ),
    # There is no MIG device at this index.
    (
        ("nvmlDeviceGetMigDeviceHandleByIndex",),
        (NOT_FOUND, INVALID_ARGUMENT),
        (Reason.NOT_ALLOCATABLE,),
    ),
    # This driver can only choose the place itself, and then may choose the right one.
    (
        tuple(each for each in nvml_codes.CHANGES if each.endswith("WithPlacement")),
        (NOT_SUPPORTED,),
        (Reason.NOT_SUPPORTED,),
    ),
    # It is in use; the process may end.
    (tuple(nvml_codes.CHANGES), (IN_USE,), ()),
)
BELIEVED: Mapping[tuple[str, int], tuple[Reason, ...]] = {
    (function, code): reasons
    for functions, codes, reasons in _BELIEVED
    for function in functions
    for code in codes or nvml_codes.codes_of(function)
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
    # A call that fails beside other GPUs is made once more without them.
    is_alone = (node.scenario.name, site.function) == ("first-on-two", "nvmlDeviceSetMigMode")
    if not (ended.is_good and is_alone):
        check_reason(site, code, ended)
    check_gpus(node, site, code, ended)
    assert node.run().is_good
    assert node.shape() == node.after
    assert node.taken() == []
    return "Recovered" if ended.is_good else ended.outcome.reason.value


def play_all(note: Note, node: nvml_node.Node, cases: Cases, *, section: str) -> None:
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


@pytest.fixture
def node(scenario: str, tmp_path: pathlib.Path) -> Iterator[nvml_node.Node]:
    (chosen,) = (each for each in nvml_node.SCENARIOS if each.name == scenario)
    with nvml_node.prepared(chosen, tmp_path / "state") as prepared:
        yield prepared


@pytest.fixture
def cases(node: nvml_node.Node, *, is_sample: bool) -> Cases:
    """Return every call and every code of it; as a sample, the changes alone and one code."""
    sites = node.record()
    if is_sample:
        changes = (site for site in sites if site.function in nvml_codes.CHANGES)
        return [(site, nvml_codes.UNKNOWN) for site in changes]
    return [(site, code) for site in sites for code in nvml_codes.codes_of(site.function)]


every_scenario_and_a_sample = pytest.mark.parametrize(
    ("scenario", "is_sample"),
    [
        *(
            pytest.param(each.name, False, marks=pytest.mark.slow, id=each.name)
            for each in nvml_node.SCENARIOS
        ),
        pytest.param("one-slice", True, id="a-sample"),
    ],
)


@every_scenario_and_a_sample
def test_any_call_may_fail_once_with_any_code_and_the_node_is_none_the_worse(
    node: nvml_node.Node, cases: Cases, record_property: Note, *, is_sample: bool
) -> None:
    section = "NVML faults, a sample" if is_sample else "NVML faults"
    play_all(record_property, node, cases, section=section)


WAYS = ("full-disk", "closed-pipe", "stalled-reader")


def play_with_lost_log(note: Note, node: nvml_node.Node, cases: Cases, *, section: str) -> None:
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


@every_scenario_and_a_sample
def test_a_run_that_fails_anywhere_ends_as_with_a_good_log_where_every_line_is_lost(
    node: nvml_node.Node, cases: Cases, record_property: Note, *, is_sample: bool
) -> None:
    section = "Lost logs, a sample" if is_sample else "Lost logs"
    play_with_lost_log(record_property, node, cases, section=section)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "function"),
    [
        ("first-on-ampere", "nvmlInitWithFlags"),
        ("first-on-ampere", "nvmlDeviceGetUUID"),
        ("first-on-ampere", "nvmlDeviceSetMigMode"),
        ("first-on-ampere", "nvmlDeviceCreateGpuInstanceWithPlacement"),
        ("one-slice", "nvmlComputeInstanceDestroy"),
        ("one-slice", "nvmlGpuInstanceDestroy"),
        ("one-slice", "nvmlGpuInstanceCreateComputeInstance"),
        ("one-slice", "nvmlShutdown"),
        ("inside", "nvmlGpuInstanceCreateComputeInstanceWithPlacement"),
    ],
)
def test_a_call_that_hangs_is_given_up_and_the_change_undone(
    node: nvml_node.Node, function: str
) -> None:
    sites = [site for site in node.record() if site.function == function]
    node.put_child_before_gpus(timeout_s=HUNG_TIMEOUT_S)
    for site in dict.fromkeys((sites[0], sites[-1])):
        fault = nvml_faults.Fault(function=function, gpu=site.gpu, first=site.nth, hang_s=600)
        ended = strike(node, site, fault)
        assert ended.outcome.reason is Reason.NVML_TIMEOUT, site
        assert ended.tracebacks == []
        assert node.taken() == []
        assert node.shape() == node.before
        assert node.run().is_good
        assert node.shape() == node.after
