"""Run the course of ``acceptance --change-gpu``: refuse a GPU in use, ask, change, restore."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from mig_manager import errors
from mig_manager.adapters import cuda
from mig_manager.adapters.host import device_users
from mig_manager.adapters.nvml import worker_client
from mig_manager.change import journal_file, shell
from mig_manager.cli import gpu_access
from mig_manager.cli.acceptance import gpu_course
from mig_manager.cli.toolkit import console
from mig_manager.core import gpu_processes, model, ports
from mig_manager.core.acceptance import surveys
from mig_manager.sandbox.driver import simulated_cuda


class ObservedCourse(NamedTuple):
    """The result of the course, with the NVML calls that it made."""

    gpu: int  # its number in the survey
    result: gpu_course.CourseResult
    calls: tuple[surveys.SurveyedCall, ...]


class _Observer(ports.Telemetry):
    """Keeps the time of each function, and kills a worker after some of its steps."""

    def __init__(self) -> None:
        self.calls: list[surveys.SurveyedCall] = []
        self._remaining: int | None = None

    def nvml_called(self, function: str, calls: int, seconds: float) -> None:
        """Keep a call."""
        self.calls.append(surveys.SurveyedCall(function, surveys.SUCCESS, seconds))

    def step_ended(self, gpu_index: int) -> None:
        """Raise once enough steps have ended, so that ``WorkerGpus`` kills the worker."""
        if self._remaining is not None:
            self._remaining -= 1
            if not self._remaining:
                raise gpu_course.WorkerKilledError

    @contextlib.contextmanager
    def killing_after(self, count: int) -> Iterator[None]:
        """Kill the worker of the body after so many steps."""
        self._remaining = count
        try:
            yield
        finally:
            self._remaining = None


def run(
    uuid: str,
    survey: surveys.Survey,
    deps: shell.ShellDependencies,
    access: gpu_access.CommandAdapters,
    asked_at: console.Console | None,
) -> ObservedCourse:
    """Run the course on a surveyed GPU, after a question at a terminal, if there is one.

    Raises:
        GpuInUseError: A process, an instance or a pod uses the GPU; nothing was changed.
        UsageError: The answer was no, or there is no terminal to ask at; nothing was changed.
        MigManagerError: As ``gpu_course.run``.
    """
    observer = _Observer()
    command = (*access.worker_gpus.command, worker_client.REPORTS_STEPS)
    gpus = dataclasses.replace(access.worker_gpus, command=command, telemetry=observer)
    deps = dataclasses.replace(deps, gpus=gpus)
    observed = gpus.observe()
    gpu = gpu_course.find_gpu(observed, uuid)
    _require_no_processes(gpu, gpus)
    deps.pods.require_unused({gpu.uuid}, (gpu,))
    if interrupted := journal_file.what_follows(deps.journal):
        deps.notify(f"{interrupted}; so does this command, before the course")
    gpu_course.require_unused(journal_file.as_if_undone(deps, observed, gpu))
    if asked_at is not None:
        _ask(gpu, asked_at)
    if undone := journal_file.undo_interrupted(deps):
        deps.notify(undone)
    line = cuda.command(
        library_path=access.settings.gpus.library_path,
        driver_roots=access.settings.gpus.driver_roots,
        program=simulated_cuda.program(access.settings.gpus.simulate_state),
    )
    using = functools.partial(cuda.using, line)
    result = gpu_course.run(deps, uuid, observer.killing_after, using)
    number = next(n for n, each in enumerate(survey.gpus) if each.gpu.uuid == uuid)
    return ObservedCourse(number, result, tuple(observer.calls))


def _require_no_processes(gpu: model.Gpu, gpus: worker_client.WorkerGpus) -> None:
    # What does not block a change of MIG mode may stay.
    processes = gpus.processes().get(gpu.uuid, ())
    users = [each for each in processes if not gpu_processes.is_releasing_daemon(each)]
    if users:
        raise errors.GpuInUseError(f"{gpu} is in use by {device_users.name_users(users)}")


def _ask(gpu: model.Gpu, terminal: console.Console) -> None:
    """Say what will happen, and ask; UsageError unless the answer is yes."""
    if not terminal.stdin.isatty():
        raise errors.UsageError(
            "--change-gpu asks a question first; without a terminal give --yes"
        )
    if gpu.current_mode is model.MigMode.ENABLED:
        mode = "Its MIG mode stays."
    elif gpu.mode_change_needs_reset:
        mode = "Its MIG mode is enabled and disabled again; the driver resets the GPU twice."
    else:
        mode = "Its MIG mode is enabled and disabled again, without a reset."
    terminal.note(
        f"{gpu}: instances are created and destroyed with every profile at every placement. "
        f"{mode} Then nvidia-smi resets the GPU once, and it is restored. Let no program use it "
        "meanwhile."
    )
    terminal.write("Continue? [y/N] ")
    if terminal.stdin.readline().strip().lower() not in ("y", "yes"):
        raise errors.UsageError("not confirmed; nothing was changed")
