"""Hold the lock of the node's GPUs, and wait for it."""

import contextlib
from collections.abc import Iterator

import structlog

from mig_manager import errors
from mig_manager.core import ports, timing

_log = structlog.get_logger()


@contextlib.contextmanager
def hold(
    lock: ports.NodeLock, doing: str, wait: timing.Wait, *, changes_gpus: bool = True
) -> Iterator[None]:
    """Wait for the node's lock, and hold it in the context.

    Raises:
        LockedError: On entering: another manager, which it names, had the lock until the deadline.
        UsageError: On entering: as ``hold`` of the lock.
    """
    with contextlib.ExitStack() as stack:
        wait.retry(
            lambda: stack.enter_context(lock.hold(doing, changes_gpus=changes_gpus)),
            may_pass=lambda error: isinstance(error, errors.LockedError),
            goal=" for it to finish",
        )
        _log.debug("lock_acquired", doing=doing)
        yield
