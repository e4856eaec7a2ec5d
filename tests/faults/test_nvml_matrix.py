"""NVML calls of a reconfiguration fail once each with every code of ``nvml_codes``, or hang once.

Struck is of each function the first call for each GPU, the first one after the first look at the
GPUs, and the last one; and every call that changes a GPU. Either the run recovers, or it ends with
the reason that the code stands for, the function and the GPU in its message, the GPUs as they were
and nothing paused; and the next run succeeds. The end is the same where every log line is lost.
A case counts only if the driver's fault has fired.
"""

import collections
import functools
import itertools
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager import reasons
from mig_manager.adapters.nvml import library, worker_client
from mig_manager.sandbox.driver import simulated_nvml, simulated_worker
from tests.faults import nvml_answers, nvml_node
from tests.rigs.driver import nvml_codes
from tests.rigs.matrices import matrix_rows
from tests.rigs.shell import lost_stderr

Reason = reasons.Reason
_MATRIX, _LOST_LOGS = "NVML faults", "Lost logs"

HUNG_TIMEOUT_S = 8.0
"""A healthy worker may take as long on a machine that is busy with other tests."""

WAYS = ("full-disk", "closed-pipe", "stalled-reader")


@pytest.fixture
def node(change: str, tmp_path: pathlib.Path) -> Iterator[nvml_node.StruckNode]:
    try:
        yield nvml_node.StruckNode(nvml_node.CHANGES[change], tmp_path / "state")
    finally:
        simulated_nvml.load(None)


def check_reason(moment: nvml_node.Moment, code: int, end: nvml_node.RunEnd) -> None:
    reason, message = end.outcome.reason, end.outcome.message
    plausible = nvml_answers.PLAUSIBLE.get((moment.function, code))
    if plausible is not None and (end.is_good or reason in plausible):
        return
    if end.is_good and (moment.function, code) in nvml_answers.STALE:
        return
    assert not end.is_good, "no run may survive this answer"
    assert reason is library.from_code(code, operation="").reason
    assert moment.operation in message
    if moment.gpu is not None:
        assert f"GPU {moment.gpu}" in message


def check_gpus(node: nvml_node.StruckNode, answer: tuple[str, int], end: nvml_node.RunEnd) -> None:
    reason = end.outcome.reason
    if end.is_good:
        assert answer == nvml_answers.NO_MIG or end.geometry == node.after
    elif reason is Reason.NOT_ALLOCATABLE:
        # The change was verified on the GPUs, or there was none.
        assert end.geometry in (node.before, node.after)
    else:
        is_hidden = reason is Reason.IN_USE and answer in nvml_answers.HIDING
        assert is_hidden or end.geometry == node.before


def check_next(node: nvml_node.StruckNode) -> None:
    again = node.run_agent()
    assert (again.is_good, again.geometry, again.remaining) == (True, node.after, [])


def fail_once(
    node: nvml_node.StruckNode, moment: nvml_node.Moment, code: int, listen: lost_stderr.Listen
) -> nvml_node.RunEnd:
    """Have one call fail once, with a log that loses all and with a good one."""
    unheard = node.strike(moment, code=code, listen=listen)
    end = node.strike(moment, code=code)
    assert end == unheard, "it ends differently where no line of the log is lost"
    answer = moment.function, code
    # What the change did not see at first is kept, and with it the journal until all is right.
    assert end.remaining in ([], ["journal"] if answer in nvml_answers.HIDING else [])
    # A call that fails beside other GPUs is made once more without them.
    is_alone = node.change.are_changes_all and moment.function == "nvmlDeviceSetMigMode"
    if not (end.is_good and is_alone):
        check_reason(moment, code, end)
    check_gpus(node, answer, end)
    check_next(node)
    return end


@pytest.mark.slow
@pytest.mark.parametrize("change", nvml_node.CHANGES)
def test_nvml_call_may_fail_once_with_any_code_and_the_node_recovers(
    node: nvml_node.StruckNode,
    change: str,
    record_property: matrix_rows.Note,
    pytestconfig: pytest.Config,
) -> None:
    faults = matrix_rows.MatrixRow(_MATRIX, change=change)
    logs = matrix_rows.MatrixRow(_LOST_LOGS, change=change)
    ends: collections.Counter[str] = collections.Counter()
    lost: collections.Counter[str] = collections.Counter()

    cases = [
        (moment, code)
        for moment in node.moments()
        for code in nvml_codes.codes_of(moment.function)
    ]
    # A call that changes a GPU fails in every way, also where the others are sampled.
    changing = [case for case in cases if case[0].function in nvml_codes.CHANGES]
    strikes = dict.fromkeys(
        (*changing, *matrix_rows.sample(cases, pytestconfig.getoption("every")))
    )
    for (moment, code), way in zip(strikes, itertools.cycle(WAYS), strict=False):
        name, before = f"{moment}, {nvml_codes.name_of(code)}, {way}", lost.total()
        try:
            end = fail_once(
                node, moment, code, functools.partial(lost_stderr.logging_lost, way, lost)
            )
        except AssertionError as error:
            faults.report([f"{name}: {error}"])
        else:
            faults.count(is_struck=True)
            ends["Recovered" if end.is_good else end.outcome.reason.value] += 1
        logs.count(is_struck=lost.total() > before)
    faults.assert_complete(record_property, {"ends": dict(sorted(ends.items()))}, of=len(cases))
    logs.assert_complete(
        record_property, {"lines lost": dict(sorted(lost.items()))}, of=len(cases)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "function"),
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
def test_a_hung_call_is_abandoned_and_the_change_undone(
    node: nvml_node.StruckNode, function: str
) -> None:
    moments = [moment for moment in node.moments() if moment.function == function]
    command = worker_client.worker_command(program=simulated_worker.program(node.state.path))
    node.gpus = worker_client.WorkerGpus(command=command, timeout_s=HUNG_TIMEOUT_S)
    for moment in dict.fromkeys((moments[0], moments[-1])):
        end = node.strike(moment, hang_s=600)
        assert end.outcome.reason is Reason.NVML_TIMEOUT, moment
        assert (end.remaining, end.geometry) == ([], node.before)
        check_next(node)


@pytest.mark.parametrize("matrix", [_MATRIX, _LOST_LOGS])
def test_the_published_results_are_of_present_changes(matrix: str) -> None:
    matrix_rows.require_rows(matrix, [{"change": name} for name in nvml_node.CHANGES])
