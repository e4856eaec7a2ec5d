"""A private D-Bus with a fake systemd and logind."""

import contextlib
import dataclasses
import math
import pathlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jeepney
import pytest
from jeepney.bus_messages import message_bus
from jeepney.io import blocking

from mig_manager import errors
from mig_manager.adapters.host import systemd
from mig_manager.reasons import Reason
from tests.rigs import programs
from tests.rigs.node import moments

SYSTEMD = "org.freedesktop.systemd1"
LOGIND = "org.freedesktop.login1"
DENIED = "org.freedesktop.DBus.Error.AccessDenied"
UNKNOWN_UNIT = f"{SYSTEMD}.NoSuchUnit"
NVSM = "nvsm.service"
NO_LIMIT_US = 2**64 - 1

_MANAGER = jeepney.DBusAddress("/org/freedesktop/systemd1", interface=f"{SYSTEMD}.Manager")
_CONFIG = """\
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>{mechanism}</auth>
  <policy context="default">
    <allow own="*"/>
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    {denied}
  </policy>
</busconfig>
"""


@dataclasses.dataclass
class Act:
    """How a unit reacts when it is stopped or started."""

    leaves: str  # its state afterwards
    result: str = "done"  # how the job ends
    takes_s: float = 0.0
    is_sent: bool = True  # whether the end of the job is signalled
    error: tuple[str, str] | None = None  # what systemd answers instead of beginning


@dataclasses.dataclass
class Unit:
    state: str = "active"
    load: str = "loaded"
    sub: str = "running"
    job_type: str = ""  # of a job that another program has queued; empty: there is none
    service_result: str = "success"
    status: int = 0
    stop_timeout_us: int = 90_000_000  # its TimeoutStopSec=; systemd's own default
    required_by: tuple[str, ...] = ()  # units with Requires= on it
    parts: tuple[str, ...] = ()  # units with PartOf= it
    triggers: str = ""  # what a socket starts; it is refused to start while that runs
    stops: Act = dataclasses.field(default_factory=lambda: Act("inactive"))
    starts: Act = dataclasses.field(default_factory=lambda: Act("active"))


@dataclasses.dataclass
class DBusDaemon:
    socket: pathlib.Path
    _process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        return f"unix:path={self.socket}"

    def kill(self) -> None:
        """End it as a crash would; done when it has ended."""
        self._process.kill()
        self._process.wait()


class FakeSystemd:
    """Plays systemd, and logind, in a thread."""

    def __init__(self, address: str, units: dict[str, Unit], *, has_logind: bool = True) -> None:
        self.units = units
        self.calls: list[str] = []
        """Methods with their arguments, questions left out."""
        self.refusals: dict[str, tuple[str, str]] = {}
        """Errors by method."""
        self.can_reboot = "yes"
        self.callbacks: moments.Plans[Callable[[], object]] = moments.Plans()
        """What happens before a method is answered."""
        self._call_count = 0
        self._connection = blocking.open_dbus_connection(address)
        bus = blocking.Proxy(message_bus, self._connection)
        bus.RequestName(SYSTEMD)
        if has_logind:
            bus.RequestName(LOGIND)
        self._jobs: dict[str, tuple[float, str, Act]] = {}
        self._has_subscriber = False  # without one, systemd sends no signal
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-systemd")
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join(timeout=60.0)
        assert not self._thread.is_alive()
        self._connection.close()

    def _serve(self) -> None:
        # The bus going away ends its clients.
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            while not self._ends.is_set():
                self.end_jobs(time.monotonic())
                with contextlib.suppress(TimeoutError):
                    message = self._connection.receive(timeout=0.01)
                    if message.header.message_type is jeepney.MessageType.method_call:
                        self._answer(message)

    def _answer(self, message: jeepney.Message) -> None:
        method = message.header.fields[jeepney.HeaderFields.member]
        if method not in {"CanReboot", "Get", "GetUnit", "LoadUnit", "Subscribe"}:
            self.calls.append(" ".join([method, *(str(each) for each in message.body)]))
        for callback in self.callbacks.planned_for(moments.Call(method, self._call_count)):
            callback()
        self._call_count += 1
        path = message.header.fields[jeepney.HeaderFields.path]
        if method == "Subscribe":
            self._has_subscriber = True
        try:
            signature, body = self._result(method, path, message.body)
        except Refusal as refusal:
            name, text = refusal.args
            answer = jeepney.new_error(message, name, "s", (text,))
        else:
            answer = jeepney.new_method_return(message, signature, body)
        self._connection.send(answer)

    def _result(
        self, method: str, path: str, body: tuple[Any, ...]
    ) -> tuple[str | None, tuple[object, ...]]:
        if method in self.refusals:
            raise Refusal(*self.refusals[method])
        match method, body:
            case "GetUnit", (name,):
                if name not in self.units:
                    raise Refusal(UNKNOWN_UNIT, f"Unit {name} not loaded.")
                return "o", (unit_path(name),)
            case "LoadUnit", (name,):
                # systemd makes an object even of a unit that has no file.
                self.units.setdefault(name, Unit(state="inactive", load="not-found"))
                return "o", (unit_path(name),)
            case "Get", (interface, name):
                return "v", (self._property(path, interface, name),)
            case "CanReboot", ():
                return "s", (self.can_reboot,)
            case (("StopUnit" | "StartUnit"), (name, _mode)):
                return "o", (self._begin(method, name),)
            case _:
                return None, ()

    def _property(self, path: str, interface: str, name: str) -> tuple[str, object]:
        if interface.endswith(".Job"):
            if path.endswith("_job"):
                return "s", self.units[unit_name(path.removesuffix("_job"))].job_type
            if path not in self._jobs:
                raise Refusal("org.freedesktop.DBus.Error.UnknownObject", "No such job.")
            return "s", "start"
        unit = self.units[unit_name(path)]
        properties: dict[str, tuple[str, object]] = {
            "ActiveState": ("s", unit.state),
            "SubState": ("s", unit.sub),
            "LoadState": ("s", unit.load),
            "Job": ("(uo)", (1, f"{path}_job") if unit.job_type else (0, "/")),
            "Result": ("s", unit.service_result),
            "ExecMainStatus": ("i", unit.status),
            "TimeoutStopUSec": ("t", unit.stop_timeout_us),
            "TimeoutUSec": ("t", unit.stop_timeout_us),
            "RequiredBy": ("as", list(unit.required_by)),
            "BoundBy": ("as", []),
            "ConsistsOf": ("as", list(unit.parts)),
            "Requires": ("as", self._named_in(path, lambda other: other.required_by)),
            "BindsTo": ("as", []),
            "PartOf": ("as", self._named_in(path, lambda other: other.parts)),
        }
        if name not in properties:
            raise Refusal("org.freedesktop.DBus.Error.UnknownProperty", f"Unknown property {name}")
        return properties[name]

    def _named_in(self, path: str, names: Callable[[Unit], tuple[str, ...]]) -> list[str]:
        target = unit_name(path)
        return [name for name, unit in self.units.items() if target in names(unit)]

    def _begin(self, method: str, name: str) -> str:
        if name == "reboot.target":
            return "/job/reboot"
        if name not in self.units:
            raise Refusal(UNKNOWN_UNIT, f"Unit {name} not found.")
        unit = self.units[name]
        act = unit.stops if method == "StopUnit" else unit.starts
        if act.error:
            raise Refusal(*act.error)
        if method == "StartUnit" and self._is_up(unit.triggers):
            act = Act("failed", result="failed")
        if method == "StopUnit":
            for each in (*unit.required_by, *unit.parts):
                if self._is_up(each):
                    self._begin(method, each)
        unit.state = "deactivating" if method == "StopUnit" else "activating"
        job = f"{unit_path(name)}/{len(self.calls)}/{len(self._jobs)}"
        self._jobs[job] = (time.monotonic() + act.takes_s, name, act)
        return job

    def _is_up(self, name: str) -> bool:
        return name in self.units and self.units[name].state == "active"

    def end_jobs(self, until_s: float = math.inf) -> None:
        """End the jobs that take until then, by the monotonic clock; by default all of them."""
        for job, (ends_at_s, name, act) in tuple(self._jobs.items()):
            if ends_at_s > until_s:
                continue
            del self._jobs[job]
            self.units[name].state = act.leaves
            if act.is_sent and self._has_subscriber:
                body = (7, job, name, act.result)
                self._connection.send(jeepney.new_signal(_MANAGER, "JobRemoved", "uoss", body))


class Refusal(Exception):  # noqa: N818 - an answer
    """What the fake answers instead: name and text of a D-Bus error."""


def unit_path(name: str) -> str:
    return "/unit/" + name.encode().hex()


def unit_name(path: str) -> str:
    return bytes.fromhex(path.removeprefix("/unit/")).decode()


@contextlib.contextmanager
def a_bus(
    folder: pathlib.Path, *, mechanism: str = "EXTERNAL", denied: str = ""
) -> Iterator[DBusDaemon]:
    """Have a bus with a way for clients to say who they are, and what its policy forbids."""
    socket, config = folder / "bus", folder / "bus.conf"
    text = _CONFIG.format(socket=socket, mechanism=mechanism, denied=denied)
    config.write_text(text, encoding="utf-8")
    program = programs.path_or_skip("dbus-daemon")
    with subprocess.Popen(  # noqa: S603 - the machine's own bus
        [program, f"--config-file={config}", "--nofork", "--nopidfile", "--print-address"],
        stdout=subprocess.PIPE,
        # Without root's rights it complains of its limits.
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        daemon = DBusDaemon(socket, process)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("unix:path=")
            yield daemon
        finally:
            daemon.kill()


@contextlib.contextmanager
def fake_systemd(
    daemon: DBusDaemon, units: dict[str, Unit] | None = None, *, has_logind: bool = True
) -> Iterator[FakeSystemd]:
    """Run the fake systemd during the body."""
    fake = FakeSystemd(daemon.address, units or {}, has_logind=has_logind)
    with contextlib.closing(fake):
        yield fake


def services(
    bus: DBusDaemon, *, stop_timeout_s: float = 10.0, start_timeout_s: float = 10.0
) -> systemd.Systemd:
    return systemd.Systemd(
        bus.address, stop_timeout_s=stop_timeout_s, start_timeout_s=start_timeout_s
    )


@contextlib.contextmanager
def fails(reason: Reason, why: str) -> Iterator[None]:
    with pytest.raises(errors.HostError, match=why) as caught:
        yield
    assert caught.value.reason is reason
