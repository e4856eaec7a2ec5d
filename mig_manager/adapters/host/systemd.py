"""systemd over D-Bus: stop and start the host's services.

Each operation has its own connection and one deadline: nothing is open at rest, and no wait is
unbounded. Source: ``org.freedesktop.systemd1(5)``.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import system_bus
from mig_manager.core.files import service_files

CALL_TIMEOUT_S = 10.0  # for connecting and for calls that systemd answers at once
_JOB_POLL_S = 1.0  # the end of a job comes as a signal; a lost signal delays us by this at most

_SYSTEMD = "org.freedesktop.systemd1"
MANAGER = system_bus.Target("/org/freedesktop/systemd1", _SYSTEMD, f"{_SYSTEMD}.Manager")
_JOB_REMOVED = (
    f"type='signal',sender='{_SYSTEMD}',interface='{MANAGER.interface}',member='JobRemoved'"
)
_UP = frozenset({"active", "reloading", "refreshing", "activating"})
_DOWN = frozenset({"inactive", "failed", "maintenance"})
_STARTING_JOBS = frozenset({"start", "restart"})

_DEPENDENTS = ("RequiredBy", "BoundBy", "ConsistsOf", "PropagatesStopTo")
"""Properties with the units that stop with a unit: the reverse of Requires=, BindsTo= and PartOf=,
and PropagatesStopTo= itself (``systemd.unit(5)``)."""
_DEPENDENCIES = ("Requires", "BindsTo", "PartOf", "StopPropagatedFrom")
_MAX_DEPENDENCIES = 512
_STOP_TIMEOUTS = {
    "service": ("Service", "TimeoutStopUSec"),
    "socket": ("Socket", "TimeoutUSec"),
}
_NO_LIMIT_US = 2**64 - 1
_KILL_MARGIN_S = 5.0  # systemd's time to kill a unit that did not stop in time, and to report it

_LOST = "lost"  # result of a job whose signal was lost; the unit's state shows the outcome

UNKNOWN_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
_log = structlog.get_logger()


@dataclasses.dataclass(eq=False, repr=False, match_args=False)
class Systemd:
    """Implements ``ports.HostServices``; without permission each method raises NO_PERMISSION."""

    address: str
    _: dataclasses.KW_ONLY
    stop_timeout_s: float  # a service may take longer to stop if systemd gives it longer
    start_timeout_s: float
    call_timeout_s: float = CALL_TIMEOUT_S
    stopping_timeout_s: float = 5.0
    """How long the start of a unit waits while the unit is still stopping: it may never end, and
    the start of other units waits."""

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the active or starting units, and the units that systemd stops with them.

        Masked units are left out even while they run: systemd would not start them again. A unit
        comes after the units that depend on it. It is an error if the agent itself or a part of
        systemd would stop too.
        """
        if not names:
            return ()
        running: dict[str, None] = {}
        with self._session("listing units of systemd", self.call_timeout_s) as units:
            for name in names:
                if units.is_running(name):
                    running |= dict.fromkeys((*units.dependents(name), name))
        return service_files.stop_order(tuple(running))

    def stop(self, name: str) -> None:
        """Stop a service and wait until it has stopped; HostError if it starts again."""
        with self._session(f"stopping {name}", self.call_timeout_s) as units:
            path = units.find(name)
            if path is None:
                return
            # systemd kills it only after its own time-out, so a shorter one is useless.
            timeout_s = max(self.stop_timeout_s, units.own_stop_timeout_s(name, path))
        with self._session(f"stopping {name}", timeout_s + self.call_timeout_s) as units:
            result = units.run_job("StopUnit", name, timeout_s=timeout_s)
            state = units.state(name)
        if state in _DOWN:
            return
        match result:
            case None:
                why = f"did not stop within {timeout_s:g} s; it is {state}"
            case "done":
                why = f"stopped and is {state} again: something else starts it"
            case "canceled":
                why = f"is {state}: another request replaced the one to stop it"
            case _:
                why = f"did not stop: {result}; it is {state}"
        raise _failure(name, why)

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        """Return whether stopping the listed units stops a unit, which may not be loaded now.

        Checked before a unit starts that only a journal names: writers of the journal must not
        choose what is started as root. It uses the unit's own dependencies, because systemd
        forgets the reverse of units that do not run.
        """
        if name in listed:
            return True
        if not service_files.is_stoppable(name):
            return False
        with self._session(f"listing dependencies of {name}", self.call_timeout_s) as units:
            return not units.dependencies(name).isdisjoint(listed)

    def start(self, name: str) -> bool:
        """Start a service and wait until it runs or has finished; return whether it was down."""
        timeout_s = self.start_timeout_s
        with self._session(f"starting {name}", timeout_s + self.call_timeout_s) as units:
            before = units.state(name)
            is_stopping = before == "deactivating"
            if is_stopping:
                timeout_s = min(timeout_s, self.stopping_timeout_s)
            result = units.run_job("StartUnit", name, timeout_s=timeout_s)
            if why := units.why_not_up(name, result, timeout_s):
                if is_stopping and result is None:
                    why = "is still stopping; systemd starts it once it has stopped"
                raise _failure(name, why)
        return before != "active"

    @contextlib.contextmanager
    def _session(self, doing: str, timeout_s: float) -> Iterator["_Units"]:
        with system_bus.session(
            self.address,
            doing,
            timeout_s=timeout_s,
            failed=reasons.Reason.HOST_SERVICE_FAILED,
            denied=reasons.Reason.NO_PERMISSION,
        ) as connection:
            yield _Units(connection)


class _Units:
    """systemd's units, over one connection."""

    def __init__(self, connection: system_bus.Connection) -> None:
        self._connection = connection

    def find(self, name: str) -> str | None:
        try:
            (path,) = self._connection.call(MANAGER, "GetUnit", "s", name)
        except system_bus.CallRefused as error:
            if error.name == UNKNOWN_UNIT:
                return None
            raise
        return str(path)

    def _get(self, path: str, name: str, kind: str = "Unit") -> Any:
        return self._connection.get(system_bus.Target(path, _SYSTEMD, f"{_SYSTEMD}.{kind}"), name)

    def state(self, name: str) -> str:
        path = self.find(name)
        return str(self._get(path, "ActiveState")) if path else "inactive"

    def is_running(self, name: str) -> bool:
        """Return whether a unit is active or starting, and not masked."""
        path = self.find(name)
        if path is None or self._get(path, "LoadState") == "masked":
            return False
        if self._get(path, "ActiveState") in _UP:
            return True
        number, job = self._get(path, "Job")
        # In the middle of a restart a unit is down, and about to be up.
        return bool(number) and self._job_type(job) in _STARTING_JOBS

    def dependents(self, name: str) -> tuple[str, ...]:
        """Return the running units that systemd stops with a unit, in that order."""
        dependents: dict[str, None] = {}
        queue = [name]
        while queue:
            path = self.find(queue.pop())
            for each in self._units(path, _DEPENDENTS) if path else ():
                if each not in dependents and each != name and self.is_running(each):
                    dependents[each] = None
                    queue.append(each)
        protected = [each for each in dependents if service_files.is_protected(each)]
        if protected:
            names = ", ".join(protected)
            raise _failure(name, f"cannot be stopped: systemd would also stop {names}")
        # A unit depends only on units before it.
        return tuple(each for each in reversed(dependents) if service_files.can_be_restarted(each))

    def dependencies(self, name: str) -> set[str]:
        """Return the units with which systemd stops a unit, loaded or not."""
        dependencies: set[str] = set()
        queue = [name]
        while queue and len(dependencies) < _MAX_DEPENDENCIES:
            (path,) = self._connection.call(MANAGER, "LoadUnit", "s", queue.pop())
            new = set(self._units(str(path), _DEPENDENCIES)) - dependencies
            dependencies |= new
            queue += [
                each
                for each in new
                if service_files.can_be_restarted(each) or each.endswith(".target")
            ]
        return dependencies

    def _units(self, path: str, properties: Iterable[str]) -> list[str]:
        units: list[str] = []
        for each in properties:
            # PropagatesStopTo= and StopPropagatedFrom= came with systemd 249.
            with contextlib.suppress(system_bus.CallRefused):
                units += self._get(path, each)
        return units

    def own_stop_timeout_s(self, name: str, path: str) -> float:
        """Return a unit's own time-out to stop; 0 if unknown or unlimited."""
        interface, prop = _STOP_TIMEOUTS.get(name.rpartition(".")[2], ("", ""))
        if not interface:
            return 0.0
        timeout_us = int(self._get(path, prop, interface))
        return 0.0 if timeout_us == _NO_LIMIT_US else timeout_us / 1e6 + _KILL_MARGIN_S

    def run_job(self, method: str, name: str, *, timeout_s: float) -> str | None:
        """Start a job of systemd's for a unit; return its result, or None at the time-out."""
        deadline_s = time.monotonic() + timeout_s
        self._connection.call(system_bus.BUS, "AddMatch", "s", _JOB_REMOVED)
        self._connection.call(MANAGER, "Subscribe")
        (job,) = self._connection.call(MANAGER, method, "ss", name, "replace")
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            signals = self._connection.signals(within_s=min(remaining_s, _JOB_POLL_S))
            result = _result(signals, job)
            if result is None and not signals and not self._job_type(job):
                # It may have ended during the call.
                result = _result(self._connection.signals(within_s=0.0), job) or _LOST
            if result is not None:
                return result
        return None

    def why_not_up(self, name: str, result: str | None, timeout_s: float) -> str | None:
        """Return why a unit is not up; None if it is, or has finished successfully."""
        path, state = self.find(name), self.state(name)
        # It has died since its start, and waits for its automatic restart.
        has_died = path is not None and self._get(path, "SubState") == "auto-restart"
        match result:
            case _ if state == "active":
                return None
            case None:
                return f"did not start within {timeout_s:g} s; it is {state}"
            case "canceled":
                why = "another request replaced the one to start it"
            case "dependency":
                why = "a unit that it needs failed"
            case "timeout":
                why = "it took longer than systemd allows"
            case "done" if state != "failed" and not has_died:
                return None
            case _ if path is not None and name.endswith(".service"):
                status = self._get(path, "ExecMainStatus", "Service")
                why = f"{self._get(path, 'Result', 'Service')}, status {status}"
            case _:
                why = "it failed"
        return f"did not start: {why}; it is {state}"

    def _job_type(self, job: str) -> str:
        try:
            return str(self._get(job, "JobType", "Job"))
        except system_bus.CallRefused:
            return ""


def _result(signals: Sequence[system_bus.Signal], job: str) -> str | None:
    for signal in signals:
        match signal:
            case ("JobRemoved", (_, ended, _, result)) if ended == job:
                return str(result)
            case _:
                pass
    return None


def _failure(name: str, why: str) -> errors.HostError:
    return errors.HostError(f"{name} {why}", reason=reasons.Reason.HOST_SERVICE_FAILED)
