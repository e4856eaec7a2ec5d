"""Hooks: programs of the node's administrator, run without a shell around a change.

As with nvidia-mig-parted, a program gets only its hook's environment. It is searched in our
``PATH``, and a relative path starts in the hook's folder.
"""

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import files, programs, subprocesses
from mig_manager.core import messages
from mig_manager.core.files import hook_files

_MAX_LOGGED = 4096  # characters of a hook's stdout, and of its stderr, in the log
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_log = structlog.get_logger()


class HookPrograms:
    """Implements ``ports.Hooks``.

    ``variables`` describe the change to all hooks. ``search_path`` is for programs without a slash
    in their name, ``timeout_s`` for hooks without their own time-out.
    """

    def __init__(
        self,
        file: str | pathlib.Path,
        *,
        variables: Mapping[str, str],
        search_path: str,
        timeout_s: float,
    ) -> None:
        self.variables = {**variables, "MIG_PARTED_HOOKS_FILE": str(file)}
        self._source = files.SourceFile(file)
        # A relative folder would mean something else in the hook's folder.
        folders = [each for each in search_path.split(":") if each.startswith("/")]
        self._search_path = ":".join(folders) or _DEFAULT_PATH
        self._timeout_s = timeout_s

    def read(self) -> hook_files.Table:
        """Parse the hooks file; ConfigError if it cannot be read or breaks the format."""
        return hook_files.parse(self._source.read(), source=self._source.name)

    def missing(self, hook: hook_files.Hook) -> str:
        """Return why a hook's program cannot be run here; empty if it probably can."""
        if self._find(hook) is not None:
            return ""
        return f"{hook.location}: program {_shown(hook.command)} is not found"

    def run(
        self,
        point: hook_files.Point,
        hook: hook_files.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        """Run a hook to its end, and kill the rest of its process group.

        Raises:
            HostError: HOOK_FAILED, as ``ports.Hooks.run``.
            MigManagerError: Of ``check``.
        """
        shown = _shown(hook.command)
        name = f"{hook.location}: the {point.value} hook {shown}"
        program = self._find(hook)
        if program is None:
            raise _failure(f"{name} cannot be run: program not found")
        timeout_s = hook.timeout_s or self._timeout_s
        began_s = time.monotonic()

        def is_late() -> bool:
            check()
            return time.monotonic() >= began_s + timeout_s

        _log.info("hook_started", point=point.value, command=shown)
        try:
            outcome = subprocesses.run(
                (program, *hook.args),
                environment=environment,
                folder=hook.workdir or None,
                is_late=is_late,
                keep=subprocesses.Keep(
                    programs.MAX_OUTPUT_BYTES,
                    keeps_stdout_end=True,
                    stderr_bytes=programs.MAX_OUTPUT_BYTES,
                ),
            )
        except OSError as error:
            where = f" in {_shown(hook.workdir)}" if hook.workdir else ""
            why = error.strerror or str(error)
            raise _failure(f"{name} cannot be run{where}: {why}") from error
        how = "" if outcome.status == 0 else subprocesses.ending(outcome.status)
        if outcome.status is None:
            how = f"was killed after {timeout_s:g} s"
        message = programs.last_line(outcome.stderr) or programs.last_line(outcome.stdout)
        output = "\n".join(filter(None, map(_end_of, (outcome.stdout, outcome.stderr))))
        # The error has the last line.
        write = _log.warning if how and output != message else _log.info
        write(
            "hook_ended",
            point=point.value,
            command=shown,
            how=how or "well",
            seconds=round(time.monotonic() - began_s, 3),
            stdout=_end_of(outcome.stdout),
            stderr=_end_of(outcome.stderr),
        )
        if how:
            raise _failure(f"{name} {how}{f': {message}' if message else ''}")

    def _find(self, hook: hook_files.Hook) -> str | None:
        if "/" not in hook.command:
            return shutil.which(hook.command, path=self._search_path)
        # An absolute path stays itself.
        path = pathlib.Path(hook.workdir, hook.command)
        with contextlib.suppress(OSError):
            if path.is_file() and os.access(path, os.X_OK):
                # A relative path starts in the hook's folder, which the child enters first.
                return hook.command
        return None


def _failure(message: str) -> errors.HostError:
    return errors.HostError(message, reason=reasons.Reason.HOOK_FAILED)


def _shown(text: str) -> str:
    return messages.printable(text[:200])


def _end_of(text: str) -> str:
    lines = text[-_MAX_LOGGED:].splitlines()
    return "\n".join(messages.printable(line) for line in lines)
