"""The agent on a host without systemd, such as Talos, where nothing answers on the bus's socket.

Talos has the socket nevertheless, and NVIDIA's manager hangs on it (mig-parted#356, #431).
"""

import contextlib
import pathlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.rigs.driver import c_library
from tests.rigs.stage import agent_stage

LAYOUT = "all-1g.10gb"


class Bus:
    """The socket of a system bus on which no program answers: it closes each connection."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True)
        self.connections = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections += 1
                connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def bus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    for name, value in c_library.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    made = Bus(tmp_path / "host/run/dbus/system_bus_socket")
    yield made
    made.close()


def reason_with(*options: str) -> str:
    """Have an agent with these options request a layout once; return the reason it ends with."""
    with agent_stage.AgentStage("2xH100-SXM5-80GB", *options, has_library=True) as stage:
        stage.label(LAYOUT)
        return str(stage.wait_for_status(LAYOUT)["reason"])


def with_host_services(folder: pathlib.Path, listed: str) -> tuple[str, ...]:
    """Return what NVIDIA's operator sets where the driver is the host's, with a list of ours."""
    file = folder / "clients.yaml"
    file.write_text(f"version: v1\nsystemd-services: {listed}\n", encoding="utf-8")
    return "--with-shutdown-host-gpu-clients", "--gpu-clients-file", str(file)


@pytest.mark.slow
@pytest.mark.parametrize("listed", [None, "[]"], ids=["off", "an empty list"])
def test_a_change_touches_no_bus(bus: Bus, tmp_path: pathlib.Path, listed: str | None) -> None:
    assert reason_with(*(with_host_services(tmp_path, listed) if listed else ())) == "Applied"
    assert bus.connections == 0


@pytest.mark.slow
def test_agent_uses_the_bus_only_for_host_services(bus: Bus, tmp_path: pathlib.Path) -> None:
    assert reason_with(*with_host_services(tmp_path, "[nvsm.service]")) == "HostServiceFailed"
    assert bus.connections > 0
