"""The image's health check against a real agent, however its port is set."""

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.host import web_server
from mig_manager.agent import probe
from mig_manager.core import liveness
from tests.rigs import programs

STUCK_AFTER_S = 10.0
AGENT = ("/opt/bin/python", "/opt/bin/mig-manager", "agent")


@contextlib.contextmanager
def agent(*, silence_s: float = 0.0, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve health as an agent does whose worker has been silent that long; yield the port."""
    now_s = 0.0
    pulse = liveness.Pulse(lambda: now_s)
    pulse.beat()
    now_s = silence_s
    checks = liveness.Health(
        pulse,
        stuck_after_s=STUCK_AFTER_S,
        contact_age_s=lambda: 0.0,
        is_recovered=lambda: False,
    )
    with web_server.served(checks, bytes, address=address, port=0) as port:
        yield port


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port without a listener, reserved for the test."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("command", "silence_s", "answer"),
    [
        # It is alive, though not ready yet.
        (AGENT, 0.0, (True, "ok")),
        (AGENT, 11.0, (False, "the loop has been stuck for 11 s")),
        (("sh", "-c", "mig-manager agent; true"), 0.0, (True, "ok")),
    ],
    ids=["alive", "stuck", "behind a shell"],
)
def test_an_agent_found_by_the_environment_reports_its_problem(
    command: tuple[str, ...], silence_s: float, answer: tuple[bool, str]
) -> None:
    with agent(silence_s=silence_s) as port:
        assert probe.check(command, {"MIG_MANAGER_HEALTH_PORT": str(port)}) == answer


@pytest.mark.parametrize("command", [AGENT, (), ("/sbin/init",), ("sh", "-c", "sleep 1 & agent")])
def test_without_a_health_port_the_probe_succeeds(command: tuple[str, ...]) -> None:
    assert probe.check(command, {}) == (True, "there is no --health-port to ask")


@pytest.mark.parametrize(
    "start",
    [
        AGENT,
        ("/sbin/docker-init", "--", "mig-manager", "agent"),
        ("mig-manager", "agent"),
        ("mig-manager", "partitioner"),
        ("tini", "--", "/opt/mig-manager/bin/nvidia-mig-manager", "-n", "node-1"),
    ],
)
def test_an_option_of_the_health_server_precedes_the_environment(
    start: tuple[str, ...], free_port: int
) -> None:
    environ = {"MIG_MANAGER_HEALTH_PORT": str(free_port)}
    with agent() as port:
        for option in ((f"--health-port={port}",), ("--health-port", str(port), "")):
            assert probe.check((*start, *option), environ) == (True, "ok")


def test_a_command_without_a_health_server_is_healthy(free_port: int) -> None:
    environ = {"MIG_MANAGER_HEALTH_PORT": str(free_port)}

    answer = probe.check(("mig-manager", "demo", "--keep"), environ)

    assert answer == (True, "demo has no health to ask for")


@pytest.mark.parametrize(
    "address",
    ["", "0.0.0.0", "127.0.0.2", "::"],  # noqa: S104 - any address is meant
)
def test_the_agent_is_probed_at_its_address_or_on_this_machine(address: str) -> None:
    if address == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with agent(address=address) as port:
        environ = {"MIG_MANAGER_HEALTH_PORT": str(port), "MIG_MANAGER_HEALTH_ADDRESS": address}
        assert probe.check(AGENT, environ) == (True, "ok")


def test_invalid_options_of_a_probe_are_refused() -> None:
    for port in ("70000", "no port"):
        with pytest.raises(errors.UsageError, match=port):
            probe.check((*AGENT, "--health-port", port), {})


def check_health(port: str) -> tuple[int, str]:
    """Run the check as the image does; what started this container is not our program."""
    command = (sys.executable, "-I", "-m", "mig_manager.agent.probe")
    done = programs.run(*command, MIG_MANAGER_HEALTH_PORT=port)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_exit_status_shows_docker_whether_the_agent_is_healthy(free_port: int) -> None:
    with agent() as port:
        assert check_health(str(port)) == (0, "ok\n")
    status, message = check_health(str(free_port))
    assert status == 1
    assert message.startswith("/healthz does not answer: ConnectionRefusedError")
    status, message = check_health("no port")
    assert status == 1
    assert "MIG_MANAGER_HEALTH_PORT" in message


def test_an_answer_without_http_is_unhealthy_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        probe.check((*AGENT, f"--health-port={silent.getsockname()[1]}"), {})
