"""Compose the ports of real or simulated GPUs, for the agent and for commands at a shell."""

from mig_manager.adapters.nvml import worker_client
from mig_manager.core import ports
from mig_manager.core.settings import host_settings, node_settings


def worker_command(
    gpus: node_settings.GpuAccess,
    task: str = "serve",
    *,
    in_use_timeout_s: float,
    proc_root: str | None = None,
) -> tuple[str, ...]:
    """Return the command of a worker for the node's GPUs; see ``worker_client``."""
    program: tuple[str, ...] = ()
    if gpus.simulate_state is not None:
        from mig_manager.sandbox.driver import simulated_worker  # noqa: PLC0415 - not for real GPUs

        program = simulated_worker.program(gpus.simulate_state)
    return worker_client.worker_command(
        task,
        library_path=gpus.library_path,
        driver_roots=gpus.driver_roots,
        program=program,
        in_use_timeout_s=in_use_timeout_s,
        proc_root=proc_root,
    )


def reset(
    gpus: node_settings.GpuAccess, roots: host_settings.HostRoots, search_path: str
) -> ports.GpuReset:
    """Return the reset of the GPUs; for simulated GPUs it does not touch the machine."""
    if gpus.simulate_state is not None:
        from mig_manager.sandbox.driver import resets, state_file  # noqa: PLC0415

        return resets.SimulatedReset(state_file.SharedState(gpus.simulate_state))
    from mig_manager.adapters.host import gpu_reset, programs  # noqa: PLC0415 - reads XML

    return gpu_reset.SmiReset(
        programs.Programs(
            gpu_reset.roots(roots),
            search_path=search_path,
            loader_variables=gpus.loader_variables,
        )
    )
