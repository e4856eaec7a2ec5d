"""systemd and logind over a real D-Bus: a bus that fails, and rebooting."""

import contextlib
import pathlib
import socket
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import structlog.testing
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.adapters.host import logind, systemd
from mig_manager.reasons import Reason
from tests.rigs.host import processes, systemd_rig
from tests.rigs.host.systemd_rig import NVSM, Act, Unit, fails, fake_systemd, services
from tests.rigs.host.systemd_rig import DBusDaemon as Bus

# -- the bus ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    # A job is asked for when its end has not been signalled for a while.
    ["StopUnit", "Get"],
)
def test_a_bus_that_disconnects_is_an_error_at_once(bus: Bus, method: str) -> None:
    unit = Unit(stops=Act("inactive", takes_s=60.0), stop_timeout_us=systemd_rig.NO_LIMIT_US)
    is_due = {"StopUnit": "active", "Get": "deactivating"}[method]
    with fake_systemd(bus, {NVSM: unit}) as played:
        played.callbacks.add(method, bus.kill, when=lambda: unit.state == is_due)
        with fails(Reason.HOST_SERVICE_FAILED, "D-Bus is unreachable"):
            services(bus).stop(NVSM)


def test_without_systemd_on_the_bus_running_services_are_unknown(bus: Bus) -> None:
    with fails(Reason.HOST_SERVICE_FAILED, "^listing units of systemd: .*ServiceUnknown"):
        services(bus).running([NVSM])


def test_a_user_rejected_by_the_bus_gets_the_reason_no_permission(tmp_path: pathlib.Path) -> None:
    with (
        # As for a process of another user namespace, the one proof that we have is refused.
        systemd_rig.a_bus(tmp_path, mechanism="ANONYMOUS") as bus,
        fails(Reason.NO_PERMISSION, "in a user namespace"),
    ):
        services(bus).running([NVSM])


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp:host=localhost", "unix:path=/nowhere/bus", "unix:runtime=yes"]
)
def test_an_address_without_a_bus_is_an_error(address: str) -> None:
    host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1)

    with fails(Reason.HOST_SERVICE_FAILED, "^stopping nvsm"):
        host.stop(NVSM)
    with fails(Reason.REBOOT_REQUIRED, "^requesting a reboot from systemd-logind"):
        logind.Reboot(address).request("test")


@contextlib.contextmanager
def impostor(path: pathlib.Path, says: tuple[bytes, ...], *, hangs: bool) -> Iterator[str]:
    """Have a socket that says these things, each after it has received data."""
    done = threading.Event()

    def serve(listener: socket.socket) -> None:
        conversation, _ = listener.accept()
        with conversation:
            for words in says:
                conversation.recv(4096)
                conversation.sendall(words)
            if hangs:
                done.wait(timeout=60.0)

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"unix:path={path}"
        finally:
            done.set()
            thread.join(timeout=60.0)
            assert not thread.is_alive()


@pytest.mark.parametrize("says", [(), (b"OK 1234\r\n",), (b"no line end",)])
def test_a_silent_bus_times_out(tmp_path: pathlib.Path, says: tuple[bytes, ...]) -> None:
    with impostor(tmp_path / "bus", says, hangs=True) as address:
        host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1, call_timeout_s=0.2)
        with fails(Reason.HOST_SERVICE_FAILED, "no answer over D-Bus in time"):
            host.running([NVSM])


def test_a_server_without_the_dbus_handshake_is_an_error(tmp_path: pathlib.Path) -> None:
    with impostor(tmp_path / "bus", (b"SSH-2.0-OpenSSH\r\n",), hangs=False) as address:
        host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1)
        # It may hang up before it has heard us out.
        with fails(Reason.HOST_SERVICE_FAILED, "D-Bus"):
            host.running([NVSM])


HEADER = b"l\x02\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00"


@hypothesis.given(data=st.binary(min_size=1) | st.binary().map(lambda tail: HEADER + tail))
@hypothesis.settings(max_examples=50, deadline=None)
def test_any_data_from_the_bus_is_an_answer_or_a_host_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "impostor"

    with impostor(path, (b"OK 1234\r\n", data), hangs=False) as address:
        host = systemd.Systemd(address, stop_timeout_s=1, start_timeout_s=1, call_timeout_s=2)
        with pytest.raises(errors.HostError):
            host.running([NVSM])


def test_no_connection_is_open_between_two_operations(bus: Bus) -> None:
    with fake_systemd(bus, {NVSM: Unit()}):
        host = services(bus)
        with processes.leaving_nothing_behind():
            host.running([NVSM])
            host.stop(NVSM)
            host.start(NVSM)
            with contextlib.suppress(errors.HostError):
                host.start("other.service")


# -- rebooting --------------------------------------------------------------------------------


def test_a_reboot_is_requested_from_logind_once_and_non_interactively(bus: Bus) -> None:
    with fake_systemd(bus) as played, structlog.testing.capture_logs() as log:
        logind.Reboot(bus.address).request("GPU 0 waits for MIG mode")

    assert played.calls == ["Reboot False"]
    assert log == [
        {
            "event": "reboot_requested",
            "log_level": "warning",
            "by": "systemd-logind",
            "why": "GPU 0 waits for MIG mode",
        }
    ]


def test_a_refused_reboot_names_the_program_and_is_not_requested_elsewhere(bus: Bus) -> None:
    refusals = (
        systemd_rig.DENIED,
        "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired",
        f"{systemd_rig.LOGIND}.BlockedByInhibitorLock",
        f"{systemd_rig.LOGIND}.OperationInProgress",
    )
    with fake_systemd(bus) as played:
        for name in refusals:
            played.refusals["Reboot"] = (name, "Not now.")
            with fails(
                Reason.REBOOT_REQUIRED, "^requesting a reboot from systemd-logind: Not now"
            ):
                logind.Reboot(bus.address).request("test")

    assert played.calls == ["Reboot False"] * len(refusals)


@pytest.mark.parametrize("answer", ["no", "na", "challenge", "inhibitor-blocked"])
def test_a_reboot_that_logind_would_refuse_is_known_before(bus: Bus, answer: str) -> None:
    with fake_systemd(bus) as played:
        logind.Reboot(bus.address).check()
        played.can_reboot = answer
        with fails(Reason.REBOOT_REQUIRED, f"^systemd-logind refuses .* is '{answer}'"):
            logind.Reboot(bus.address).check()

    assert played.calls == []


@pytest.mark.parametrize("is_masked", [True, False])
def test_reboot_without_logind_starts_systemds_target(bus: Bus, *, is_masked: bool) -> None:
    with fake_systemd(bus, has_logind=is_masked) as played:
        for method in ("Reboot", "CanReboot"):
            played.refusals[method] = (f"{systemd_rig.SYSTEMD}.UnitMasked", "Masked.")
        logind.Reboot(bus.address).check()
        logind.Reboot(bus.address).request("test")

    assert played.calls[-1] == "StartUnit reboot.target replace-irreversibly"


def test_without_logind_and_systemd_a_reboot_fails(bus: Bus) -> None:
    with fails(Reason.REBOOT_REQUIRED, "^looking for systemd's reboot.target: .*ServiceUnknown"):
        logind.Reboot(bus.address).check()
    with fails(Reason.REBOOT_REQUIRED, "^requesting a reboot from systemd: .*ServiceUnknown"):
        logind.Reboot(bus.address).request("test")
