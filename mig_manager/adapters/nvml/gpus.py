"""The GPUs of this node through NVIDIA's management library."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, cast

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_calls, nvml_execute, nvml_observe, nvml_session
from mig_manager.core import model, steps, timing

_Result = TypeVar("_Result")

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0


class NvmlGpus:
    """Implements ``ports.Gpus``: one NVML session for each call, one thread for each GPU.

    A call into a hung driver does not return and cannot be cancelled; ``gpu_child.WorkerGpus``
    puts a process around this class for callers that must go on.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find the right one.
        in_use_timeout_s: How long, for each GPU and from the first IN_USE on, a step is tried
            again while somebody holds the GPU or the instance.
        clock: For that wait.
        proc_root: Where to look for processes that hold a GPU; None: NVML's lists have to do.
    """

    def __init__(
        self,
        *,
        library_path: str | None = None,
        driver_roots: Sequence[str] = (),
        in_use_timeout_s: float = 30.0,
        clock: timing.Clock,
        proc_root: pathlib.Path | None = None,
    ) -> None:
        self._session = functools.partial(nvml_session.opened, library_path, driver_roots)
        self._proc_root = proc_root
        self._driver_roots = tuple(driver_roots)
        self._in_use_timeout_s = in_use_timeout_s
        self._clock = clock

    def observe(self) -> model.ObservedGpus:
        """Return every GPU, ascending by index, and those that cannot be observed.

        Raises:
            HardwareError: NVML cannot be loaded, refused or failed; or no GPU at all can be
                observed. With NO_PERMISSION when MIG is on and the caller may not list instances:
                they are never reported as none.
        """
        with self._session():
            count = nvml_calls.call(pynvml.nvmlDeviceGetCount)
            observe = functools.partial(nvml_observe.gpu, tells_minor=self._proc_root is not None)
            observed = _observed(_each([functools.partial(observe, i) for i in range(count)]))
        if observed.unreachable and not observed:
            raise _joined([_failure(gpu) for gpu in observed.unreachable])
        return observed

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        """Run the steps of every GPU, GPUs in parallel, the steps of one GPU in order.

        Returns:
            The GPUs of the plan afterwards, observed within the same session.

        Raises:
            GpuInUseError: Before the first step: processes use what the plan destroys, which the
                plan forbids.
            StalePlanError: Before the first step of such a plan: what it creates exists already.
            HardwareError: A step failed; the message names every GPU that did. NOT_SUPPORTED
                before the first step: the library lacks a function that the plan needs.
        """
        known = {gpu.uuid: gpu for gpu in seen}
        with self._session_for(plan, known):
            runs = [
                functools.partial(self._run, gpu, known.get(gpu.gpu_uuid)) for gpu in plan.gpus
            ]
            return _observed(_each(runs))

    @contextlib.contextmanager
    def _session_for(self, plan: steps.Plan, known: Mapping[str, model.Gpu]) -> Iterator[None]:
        """Open a session in which a plan may be executed."""
        require_idle = self._idle_check(plan) if plan.requires_idle else None
        with self._session():
            _require_functions(plan)
            if require_idle is not None:
                require_idle()
                for gpu in plan.gpus:
                    self._require_fresh(gpu, known.get(gpu.gpu_uuid))
            yield

    def _require_fresh(self, plan: steps.GpuPlan, known: model.Gpu | None) -> None:
        try:
            nvml_execute.require_fresh(plan, known)
        except errors.HardwareError as error:
            # An unreachable GPU does not stop the others.
            if not _is_unreachable(plan, error):
                raise

    def _idle_check(self, plan: steps.Plan) -> Callable[[], None]:
        """Return what raises ``GpuInUseError``, within a session, while the plan is in the way."""
        # Only for plans that destroy something. The device nodes are looked at before the session
        # is opened, which would have us among those who have the GPUs open.
        from mig_manager.adapters.nvml import processes as gpu_processes  # noqa: PLC0415

        files = gpu_processes.OpenFiles.seen(
            self._proc_root, self._driver_roots, but=(os.getpid(), os.getppid())
        )
        return functools.partial(gpu_processes.require_idle, plan, files)

    def _run(
        self, plan: steps.GpuPlan, known: model.Gpu | None
    ) -> model.Gpu | model.UnreachableGpu:
        patience = _Patience(timeout_s=self._in_use_timeout_s, clock=self._clock)
        try:
            return nvml_execute.run(
                plan,
                patience.run,
                known=known,
                proc_root=self._proc_root,
                driver_roots=self._driver_roots,
            )
        except errors.HardwareError as error:
            if not _is_unreachable(plan, error):
                raise
            lost = model.UnreachableGpu(
                index=plan.gpu_index,
                uuid=plan.gpu_uuid,
                reason=error.reason,
                code=error.code,
                message=error.message.removeprefix(f"{error.gpu}: "),
            )
            return lost.identified(known) if known else lost


_MODE_FUNCTIONS = ("nvmlDeviceGetMigMode", "nvmlDeviceSetMigMode")
_INSTANCE_FUNCTIONS = (
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceCreateGpuInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
)
"""To create and to destroy instances: a plan that does only one of these is rolled back by the
other. The ``...WithPlacement`` functions, which R450 (for GPU instances) and R515 (for compute
instances) lack, are not among them: ``nvml_execute`` does without."""


def _require_functions(plan: steps.Plan) -> None:
    """Check that the loaded library has each function that a plan and its rollback need.

    Raises:
        HardwareError: NOT_SUPPORTED, with the names of the missing functions.
    """
    needed: tuple[str, ...] = ()
    if any(isinstance(step, steps.SetMode) for step in plan.steps):
        needed += _MODE_FUNCTIONS
    if any(not isinstance(step, steps.SetMode) for step in plan.steps):
        needed += _INSTANCE_FUNCTIONS
    missing = [name for name in needed if not hasattr(pynvml.nvmlLib, name)]
    if missing:
        raise errors.HardwareError(
            f"the driver's NVML library has no {', '.join(missing)}, which this change needs",
            reason=errors.Reason.NOT_SUPPORTED,
            operation=missing[0],
        )


_MAY_BE_UNREACHABLE = frozenset(
    {
        errors.Reason.GPU_LOST,
        errors.Reason.GPU_NEEDS_RESET,
        errors.Reason.NVML_ERROR,
    }
)
"""Why a step fails on a GPU that may be unreachable now."""


def _is_unreachable(plan: steps.GpuPlan, error: errors.HardwareError) -> bool:
    """Tell whether an error is due to the GPU, which then cannot be observed either."""
    return error.reason in _MAY_BE_UNREACHABLE and not _can_be_observed(plan)


def _can_be_observed(plan: steps.GpuPlan) -> bool:
    try:
        now = nvml_observe.gpu(plan.gpu_index)
    except errors.HardwareError:
        # The driver as a whole fails: that is no matter of this GPU.
        return True
    return isinstance(now, model.Gpu) and now.uuid == plan.gpu_uuid


def _observed(
    each: Iterable[model.Gpu | model.UnreachableGpu],
) -> model.ObservedGpus:
    gpus = tuple(each)
    return model.ObservedGpus(
        _sharing(gpu for gpu in gpus if isinstance(gpu, model.Gpu)),
        (gpu for gpu in gpus if isinstance(gpu, model.UnreachableGpu)),
    )


def _failure(gpu: model.UnreachableGpu) -> errors.HardwareError:
    return errors.HardwareError(
        f"{gpu}: {gpu.message}", reason=gpu.reason, gpu=str(gpu), code=gpu.code
    )


_Offer = tuple[model.GpuInstanceProfile, ...] | None


def _sharing(gpus: Iterable[model.Gpu]) -> tuple[model.Gpu, ...]:
    """Have GPUs that offer the same share it, which is most of what goes over a pipe.

    What instances of a profile can hold is then known of all of them where one has told.
    """
    each = tuple(gpus)
    offers: list[_Offer] = []
    places: list[int] = []
    for gpu in each:
        place = next((i for i, one in enumerate(offers) if one == gpu.profiles), len(offers))
        if place == len(offers):
            offers.append(gpu.profiles)
        offers[place] = _joined_offer(offers[place], gpu.profiles)
        places.append(place)
    pairs = zip(each, places, strict=True)
    return tuple(dataclasses.replace(gpu, profiles=offers[place]) for gpu, place in pairs)


def _joined_offer(one: _Offer, other: _Offer) -> _Offer:
    if one is other or one is None or other is None:
        return one
    pairs = zip(one, other, strict=True)
    return tuple(left if left.compute_profiles else right for left, right in pairs)


class _Patience:
    """Tries again while a GPU is in use, for a bounded time that starts with the first refusal.

    The bound is for all steps of the GPU together, so that it also bounds the whole run.
    """

    def __init__(self, *, timeout_s: float, clock: timing.Clock) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline: float | None = None

    def run(self, action: Callable[[], None]) -> None:
        """Run an action until it does not fail with IN_USE, or the time is up."""
        try:
            action()
        except errors.HardwareError as error:
            if not _is_in_use(error) or self._is_over():
                raise
        else:
            return
        self._clock.wait(_FIRST_WAIT_S)
        self._again(action)

    def _again(self, action: Callable[[], None]) -> None:
        import tenacity  # noqa: PLC0415 - a fifth of the worker's start, and seldom needed

        tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_in_use),
            stop=lambda _state: self._is_over(),
            wait=tenacity.wait_exponential(multiplier=2 * _FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            sleep=self._clock.wait,
            reraise=True,
        )(action)

    def _is_over(self) -> bool:
        now = self._clock.monotonic()
        if self._deadline is None:
            self._deadline = now + self._timeout_s
        return now >= self._deadline


def _is_in_use(error: BaseException) -> bool:
    return isinstance(error, errors.HardwareError) and error.reason is errors.Reason.IN_USE


class _Doing(threading.Thread, Generic[_Result]):
    """An action under way in a thread of its own, and what came of it."""

    def __init__(self, action: Callable[[], _Result]) -> None:
        super().__init__()
        self._action = action
        self.error: BaseException | None = None
        self.result: _Result | None = None

    def run(self) -> None:
        try:
            self.result = self._action()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error


def _each(actions: Sequence[Callable[[], _Result]]) -> Iterator[_Result]:
    """Run the actions at once; when all have ended, raise what went wrong in one error."""
    doings = [_Doing(action) for action in actions]
    try:
        for doing in doings:
            doing.start()
    finally:
        # Whatever happens: the session must not be closed under any of them.
        for doing in doings:
            if doing.ident is not None:
                doing.join()
    failed = [doing.error for doing in doings if doing.error is not None]
    known = [error for error in failed if isinstance(error, errors.HardwareError)]
    if known:
        # The caller gets no result that could name the GPUs that were lost meanwhile.
        lost = [
            _failure(doing.result)
            for doing in doings
            if isinstance(doing.result, model.UnreachableGpu)
        ]
        raise _joined([*known, *lost]) from known[0]
    for error in failed:
        raise error
    return (cast("_Result", doing.result) for doing in doings)


def _joined(failures: list[errors.HardwareError]) -> errors.HardwareError:
    first = failures[0]
    heads: dict[str, list[str]] = {}
    are_alike = len({failure.reason for failure in failures}) == 1
    for failure in failures:
        head, _, explanation = failure.message.partition("; ")
        # The error has the reason of the first GPU; the others' would be lost.
        head = head if are_alike else f"{head} ({failure.reason.value})"
        heads.setdefault(explanation, []).append(head)
    # An explanation that several GPUs share is given once.
    parts = [part for explanation, own in heads.items() for part in (*own, explanation) if part]
    return errors.HardwareError(
        "; ".join(parts),
        reason=first.reason,
        operation=first.operation,
        gpu=first.gpu,
        code=first.code,
    )
