"""What a command at a shell works with: settings to adapters.

Each adapter is imported where it is needed, because most commands need few of them.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import clock
from mig_manager.change import local
from mig_manager.cli import command_settings, console
from mig_manager.core import model, ports
from mig_manager.core.host import gpu_processes
from mig_manager.core.layout import generator

_HOLDERS_TIMEOUT_S = 5.0
"""What the holders of the GPUs are worth to 'status'."""


class Reach:
    """The GPUs, and what else is beneath one command."""

    def __init__(
        self, command: str, given: command_settings.CommandSettings, terminal: console.Console
    ) -> None:
        self._command = command
        self._given = given
        self._terminal = terminal

    def gpus(self) -> ports.Gpus:
        """Return GPUs to look at, in this process, because that is quickest."""
        from mig_manager.adapters.nvml import gpus as nvml_gpus  # noqa: PLC0415 - not for `validate --gpu`

        self._simulate()
        if self._given.gpus.is_simulated:
            from mig_manager.cli import simulation  # noqa: PLC0415 - not for real GPUs

            simulation.install(self._given.gpus)
        return nvml_gpus.ThreadGpus(
            nvml_gpus.NvmlGpus(
                library_path=self._given.gpus.library_path,
                driver_roots=self._given.gpus.driver_roots,
                in_use_timeout_s=self._given.in_use_timeout_s,
                clock=clock.SystemClock(),
            ),
            timeout_s=self._given.gpu_timeout_s,
        )

    def world(self) -> local.Dependencies:
        """Return what a change works with; its GPU work can be killed and undone."""
        from mig_manager.adapters.host import files, lock_file  # noqa: PLC0415 - as above
        from mig_manager.adapters.nvml_worker import client as nvml_worker  # noqa: PLC0415 - as above

        self._simulate()
        journal = files.JournalFile(self._given.journal_file)
        proven = files.VerifiedLayoutFile(self._given.proven_file)
        state = self._given.gpus.simulate_state
        world = local.Dependencies(
            gpus=nvml_worker.WorkerGpus(
                command=nvml_worker.worker_command(
                    library_path=self._given.gpus.library_path,
                    driver_roots=self._given.gpus.driver_roots,
                    simulate_state=str(state) if state else None,
                    in_use_timeout_s=self._given.in_use_timeout_s,
                ),
                timeout_s=self._given.gpu_timeout_s,
            ),
            lock=lock_file.LockFile(
                self._given.lock_file,
                program=f"mig-manager {self._command}",
                clock=clock.SystemClock(),
                is_required=True,
            ),
            journal=journal,
            boot_layout=proven,
            clock=clock.SystemClock(),
            boot_id=self._boot_id(),
            lock_timeout_s=self._given.lock_timeout_s,
            notify=self._terminal.note,
            idle_timeout_s=self._given.idle_timeout_s,
            uninterrupted=lambda: console.signals_deferred(self._terminal.note),
        )
        if self._given.hooks_file and self._command != "boot":
            world = dataclasses.replace(world, hooks=self._hooks(self._given.hooks_file))
        # Simulated GPUs are no reason to do anything to the real machine.
        return world if state else self._with_machine(world)

    def _hooks(self, file: str) -> ports.Hooks:
        from mig_manager.adapters.host import hooks  # noqa: PLC0415 - only where there are some

        return hooks.HookPrograms(
            file,
            variables=command_settings.hook_variables(self._command, self._given),
            search_path=self._given.search_path,
            timeout_s=self._given.hook_timeout_s,
        )

    def _with_machine(self, world: local.Dependencies) -> local.Dependencies:
        from mig_manager.adapters.host import (  # noqa: PLC0415 - as above
            device_nodes,
            gpu_reset,
            programs,
        )

        roots = self._given.roots
        found = programs.Programs(
            gpu_reset.roots(roots),
            search_path=self._given.search_path,
            loader_variables=self._given.gpus.loader_variables,
        )
        return dataclasses.replace(
            world,
            reset=gpu_reset.SmiReset(found).reset,
            device_files=device_nodes.DeviceFiles(roots),
        )

    def _boot_id(self) -> str:
        if self._given.gpus.is_simulated:
            from mig_manager.cli import simulation  # noqa: PLC0415 - not for real GPUs

            return simulation.boot_id(self._given.gpus)
        from mig_manager.adapters.host import procfs  # noqa: PLC0415 - only to change something

        return procfs.boot_id()

    def _simulate(self) -> None:
        if self._given.gpus.is_simulated:
            from mig_manager.cli import simulation  # noqa: PLC0415 - not for real GPUs

            simulation.prepare(self._given.gpus)
            self._terminal.note(f"GPUs are simulated, in {self._given.gpus.simulate_state}")

    def pods(self) -> Mapping[str, tuple[str, ...]] | None:
        """Return the pods by the UUID of what they hold; None where no kubelet is asked."""
        if self._given.pod_resources_socket is None:
            return None
        from mig_manager.adapters.kubelet import pod_resources  # noqa: PLC0415 - only when asked for

        holders: dict[str, tuple[str, ...]] = {}
        for pod in pod_resources.PodResources(str(self._given.pod_resources_socket)).assigned():
            for device_id in pod.device_ids:
                holders[device_id] = (*holders.get(device_id, ()), pod.key)
        return holders

    def templates(self) -> Sequence[model.Gpu]:
        """Return one idle GPU of each product named."""
        from mig_manager.catalogue import products  # noqa: PLC0415 - only for products by name

        return products.templates(self._given.products, tell=self._terminal.note)

    def kinds(self) -> Sequence[generator.Kind]:
        """Return the kinds of the products named, or else of this machine's GPUs.

        Raises:
            LayoutError: None has MIG, or the driver does not tell what they offer.
        """
        if not self._given.products:
            return generator.kinds_of(self.gpus().observe())
        from mig_manager.catalogue import products  # noqa: PLC0415 - only for products by name

        return products.kinds(self._given.products, tell=self._terminal.note)

    def holders(self) -> Mapping[str, tuple[gpu_processes.GpuProcess, ...]] | None:
        """Return who holds the GPUs; None where that is not told, which is no failure."""
        from mig_manager.adapters.host import procfs  # noqa: PLC0415 - seldom asked
        from mig_manager.adapters.nvml import hung_call  # noqa: PLC0415 - seldom asked
        from mig_manager.adapters.nvml import processes as gpu_processes  # noqa: PLC0415 - as above

        look = functools.partial(
            gpu_processes.inspect,
            self._given.gpus.library_path,
            driver_roots=self._given.gpus.driver_roots,
            # The kernel knows nothing of simulated GPUs.
            proc_root=None if self._given.gpus.is_simulated else procfs.ROOT,
            exclude=(os.getpid(),),
        )
        timeout_s = min(_HOLDERS_TIMEOUT_S, self._given.gpu_timeout_s)
        try:
            return dict(hung_call.CallThread(look).result(timeout_s).holders)
        except (errors.HardwareError, OSError):
            return None
