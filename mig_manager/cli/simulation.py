"""Simulated GPUs for a command line: where their state is, and when it starts afresh."""

import pathlib

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.sandbox.driver import state_file, states


def prepare(access: settings.GpuAccess) -> None:
    """Have a state file, a new one when there is none or a fresh start is wanted.

    Raises:
        UsageError: The spec is no node, the file holds another node or something else or cannot
            be written, or there is neither file nor spec.
    """
    path = access.simulate_state
    if path is None:
        return
    try:
        if access.is_fresh:
            _remove(path, access)
        if access.simulate_spec:
            state_file.SharedState(path).create(access.simulate_spec, states.Options())
        elif not path.exists():
            raise errors.UsageError(f"{path} does not exist; --simulate says what to simulate")
        state_file.SharedState(path).read()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise errors.UsageError(
            f"{path} holds no simulated GPUs; name another file, or remove this one"
        ) from error
    except OSError as error:
        raise errors.UsageError(
            f"cannot keep simulated GPUs in {path}: {error.strerror or error}"
        ) from error


def _remove(path: pathlib.Path, access: settings.GpuAccess) -> None:
    if path.exists():
        # A mistyped path must not cost anybody a file that is not ours.
        state_file.SharedState(path).read()
        path.unlink()
    for suffix in (settings.JOURNAL_SUFFIX, settings.PROVEN_SUFFIX):
        if (file := access.beside_state(suffix)) is not None:
            file.unlink(missing_ok=True)


def install(access: settings.GpuAccess) -> None:
    """Put the simulated GPUs in the place of NVML, in this process."""
    if access.simulate_state is not None:
        # An agent leaves it to its workers.
        from mig_manager.sandbox.driver import library as simulated  # noqa: PLC0415

        simulated.install(access.simulate_state)


def boot_id(access: settings.GpuAccess) -> str:
    """Return what tells this boot of the simulated node from others; empty for real GPUs."""
    return state_file.SharedState(access.simulate_state).boot_id if access.simulate_state else ""
