"""Build the adapters of a command from its settings, for real or simulated GPUs.

Imports are local, because most commands need few adapters.
"""

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mig_manager import errors, reasons
from mig_manager.adapters import host
from mig_manager.change import pod_use, shell
from mig_manager.cli import gpu_settings, progress
from mig_manager.cli.toolkit import console, signals
from mig_manager.core import gpu_processes, model, ports
from mig_manager.core.settings import node_settings

if TYPE_CHECKING:
    from mig_manager.adapters.nvml import worker_client

_PROCESSES_TIMEOUT_S = 5.0  # how long 'status' may look for GPU processes
_KUBELET_TIMEOUT_S = 5.0  # how long a change waits for kubelet's answer


class CommandAdapters:
    """The adapters of one command.

    Raises:
        UsageError: The simulated GPUs cannot be prepared.
        ConfigError: The file of a capture cannot be read.
    """

    def __init__(self, settings: gpu_settings.GpuSettings, terminal: console.Console) -> None:
        self.settings = settings
        self._terminal = terminal
        prepare_simulation(settings.gpus, terminal.note)

    @functools.cached_property
    def _gpus(self) -> ports.Gpus:
        """This machine's GPUs, for reading in this process, which is fastest."""
        from mig_manager.adapters.nvml import nvml_gpus

        if self.settings.gpus.simulate_state is not None:
            from mig_manager.sandbox.driver import simulated_nvml

            simulated_nvml.install(self.settings.gpus.simulate_state)
        return nvml_gpus.NvmlGpus(
            library_path=self.settings.gpus.library_path,
            driver_roots=self.settings.gpus.driver_roots,
            clock=host.SystemClock(),
        )

    def observe(self) -> model.ObservedGpus:
        """Observe this machine's GPUs in a thread, and wait with a deadline.

        While the main thread is in a hung call, Python handles no signal.

        Raises:
            HardwareError: NVML refused or failed; NVML_TIMEOUT: it does not answer.
        """
        from mig_manager.adapters.host import call_thread

        timeout_s = self.settings.gpu_timeout_s
        try:
            return call_thread.CallThread(self._gpus.observe).result(timeout_s)
        except TimeoutError as error:
            raise errors.HardwareError(
                f"NVML gave no answer within {timeout_s:g} s", reason=reasons.Reason.NVML_TIMEOUT
            ) from error

    @functools.cached_property
    def worker_gpus(self) -> "worker_client.WorkerGpus":
        """This machine's GPUs, for changes by a worker process."""
        from mig_manager import gpu_ports
        from mig_manager.adapters.nvml import worker_client

        settings = self.settings
        command = gpu_ports.worker_command(
            settings.gpus, in_use_timeout_s=settings.in_use_timeout_s
        )
        columns = self._terminal.progress_columns
        return worker_client.WorkerGpus(
            command=(*command, worker_client.REPORTS_STEPS) if columns else command,
            timeout_s=settings.gpu_timeout_s,
            telemetry=progress.Progress(self._terminal.remarks, columns),
        )

    def dependencies(
        self, hook_variables: Mapping[str, str] | None = None
    ) -> shell.ShellDependencies:
        """Return the dependencies of a change; a worker process changes the GPUs.

        ``hook_variables`` are the command's options as mig-parted passes them to hooks; None runs
        no hooks.
        """
        from mig_manager import gpu_ports
        from mig_manager.adapters.host import device_nodes, files, lock_file

        settings = self.settings
        gpus = self._terminal.replace_adapter(self.worker_gpus)
        dependencies = shell.ShellDependencies(
            gpus=gpus,
            processes=gpus.processes,
            lock=lock_file.LockFile(
                settings.lock_file,
                program=f"mig-manager {settings.command}",
                clock=host.SystemClock(),
                is_required=True,
            ),
            journal=files.JournalFile(settings.journal_file),
            verified_layout_file=files.VerifiedLayoutFile(settings.verified_layout_file),
            clock=host.SystemClock(),
            boot_id=boot_id(settings.gpus),
            lock_timeout_s=settings.lock_timeout_s,
            notify=self._terminal.note,
            idle_timeout_s=settings.idle_timeout_s,
            in_use_timeout_s=settings.in_use_timeout_s,
            uninterrupted=lambda: signals.deferred(self._terminal.note),
            pods=self.pods,
            reset=gpu_ports.reset(settings.gpus, settings.roots, settings.search_path),
        )
        if settings.hooks_file and hook_variables is not None:
            from mig_manager.adapters.host import hooks

            dependencies = dataclasses.replace(
                dependencies,
                hooks=hooks.HookPrograms(
                    settings.hooks_file,
                    variables={
                        "MIG_PARTED_MODE_CHANGE_ONLY": str(settings.is_mode_only).lower(),
                        **hook_variables,
                    },
                    search_path=settings.search_path,
                    timeout_s=settings.hook_timeout_s,
                ),
            )
        if settings.gpus.is_simulated:
            # Simulated GPUs must not change the real machine.
            return dependencies
        refresh = functools.partial(device_nodes.refresh_files, settings.roots)
        return dataclasses.replace(dependencies, refresh_files=refresh)

    @functools.cached_property
    def pods(self) -> pod_use.PodUse:
        """The devices of this machine's pods."""
        return pod_use.PodUse(kubelet=self.kubelet, is_ignored=self.settings.ignores_pods)

    def kubelet(self) -> ports.DeviceAllocations | None:
        """Return kubelet's API at the named socket, or at the usual one if kubelet has started.

        None for a kubelet that has not started, and for simulated GPUs without a named socket.
        """
        settings = self.settings
        named = settings.pod_resources_socket
        if named is None and settings.gpus.is_simulated:
            return None
        from mig_manager.adapters import pod_resources

        kubelet = pod_resources.PodResources(
            str(named or settings.usual_socket), timeout_s=_KUBELET_TIMEOUT_S
        )
        # The boot unit starts before kubelet.
        is_booting = settings.command == "boot"
        is_required = named is not None and not is_booting
        return kubelet if is_required or kubelet.has_started(is_booting=is_booting) else None

    @functools.cached_property
    def observed(self) -> model.ObservedGpus:
        """This machine's GPUs, observed once."""
        return self.observe()

    def processes(self) -> Mapping[str, tuple[gpu_processes.GpuProcess, ...]] | None:
        """Return the processes by the UUID of the GPU they use; None if unknown."""
        from mig_manager.adapters.host import call_thread, procfs
        from mig_manager.adapters.nvml import processes as nvml_processes

        inspect = functools.partial(
            nvml_processes.inspect,
            self.settings.gpus.library_path,
            driver_roots=self.settings.gpus.driver_roots,
            # The kernel does not know simulated GPUs.
            proc_root=None if self.settings.gpus.is_simulated else procfs.ROOT,
            exclude=(os.getpid(),),
        )
        timeout_s = min(_PROCESSES_TIMEOUT_S, self.settings.gpu_timeout_s)
        try:
            return dict(call_thread.CallThread(inspect).result(timeout_s).processes)
        except (errors.HardwareError, OSError):
            return None


def prepare_simulation(access: node_settings.GpuAccess, note: Callable[[str], object]) -> None:
    """Create the state file of simulated GPUs if it is missing, or if a fresh start is requested.

    Does nothing for real GPUs. ``note`` gets a sentence about the simulation.

    Raises:
        UsageError: The spec is invalid or missing, or the file cannot be written, holds another
            node, or holds no simulated GPUs.
        ConfigError: The file of a capture cannot be read.
    """
    from mig_manager.adapters.host import files
    from mig_manager.sandbox import node_spec
    from mig_manager.sandbox.driver import state_file, states

    path = access.simulate_state
    if path is None:
        return
    state = state_file.SharedState(path)
    try:
        if access.is_fresh:
            if path.exists():
                # A mistyped path must not remove a file that is not ours.
                state.read()
                path.unlink()
            journal = state.beside(node_settings.JOURNAL_SUFFIX)
            layout = state.beside(node_settings.LAYOUT_SUFFIX)
            for file in (journal, layout, files.host_copy_path(layout)):
                file.unlink(missing_ok=True)
        is_new = not path.exists()
        if access.simulate_spec:
            node = node_spec.node(access.simulate_spec)
            state.create(node.spec, states.Options(latency=node.latency))
        elif is_new:
            raise errors.UsageError(f"{path} does not exist; create it with --simulate")
        names = collections.Counter(state.products)
    except ValueError as error:
        raise errors.UsageError(
            f"{path} has no simulated GPUs that this version can read",
            remedy="Remove the file, or name another one with --simulate-state.",
        ) from error
    except OSError as error:
        raise state_file.NotSavedError(path, error) from error
    if is_new or access.is_from_variable:
        gpus = " + ".join(f"{number} {name}" for name, number in names.items())
        note(f"simulated GPUs: {gpus}, in {path}")


def boot_id(access: node_settings.GpuAccess) -> str:
    """Return the boot id of the simulated node or, for real GPUs, of this machine."""
    if access.simulate_state is None:
        from mig_manager.adapters.host import procfs

        return procfs.boot_id()
    from mig_manager.sandbox.driver import state_file

    return state_file.SharedState(access.simulate_state).boot_id
