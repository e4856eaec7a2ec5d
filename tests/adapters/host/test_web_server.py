"""Liveness and readiness over real HTTP: what kubelet gets, and which clients disturb nothing."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.host import web_server
from mig_manager.core import liveness
from tests.rigs import waiting

STUCK_AFTER_S = 10.0


class HealthState:
    """An agent's state that a test sets by hand."""

    now_s = 100.0
    contact_age_s = 0.0
    is_recovered = True

    def __init__(self) -> None:
        self.pulse = liveness.Pulse(lambda: self.now_s)
        self.health = liveness.Health(
            self.pulse,
            stuck_after_s=STUCK_AFTER_S,
            contact_age_s=lambda: self.contact_age_s,
            is_recovered=lambda: self.is_recovered,
        )


@pytest.fixture
def state() -> HealthState:
    return HealthState()


@contextlib.contextmanager
def serving(
    state: HealthState,
    *,
    address: str = "127.0.0.1",
    exposition: Callable[[], bytes] = lambda: b"metric 1\n",
) -> Iterator[int]:
    with web_server.served(state.health, exposition, address=address, port=0) as port:
        yield port


def ask(port: int, path: str, *, method: str = "GET") -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


# -- the checks -------------------------------------------------------------------------------


BEAT, REST = liveness.Pulse.beat, liveness.Pulse.rest
STUCK = "the loop has been stuck for 10 s"


@pytest.mark.parametrize(
    ("signs", "why"),
    [
        pytest.param([1e6], "", id="never-asked-for-a-sign-of-life"),
        pytest.param([BEAT, REST, 1e6], "", id="waits-for-a-request"),
        pytest.param([BEAT, STUCK_AFTER_S - 1], "", id="within-the-bound"),
        pytest.param([BEAT, STUCK_AFTER_S - 1, 1], STUCK, id="stuck"),
        pytest.param([BEAT, 2 * STUCK_AFTER_S, BEAT], "", id="goes-on"),
    ],
)
def test_worker_without_a_sign_of_life_is_stuck_unless_it_waits(
    state: HealthState, signs: list[float | Callable[[liveness.Pulse], None]], why: str
) -> None:
    for sign in signs:
        if isinstance(sign, float | int):
            state.now_s += sign
        else:
            sign(state.pulse)

    assert (state.health.why_dead(), state.health.why_unready()) == (why, why)


@pytest.mark.parametrize(
    ("age_s", "is_recovered", "why"),
    [
        (150.0, True, ""),
        (200.0, True, "the Kubernetes API has not been heard of for 200 s"),
        (float("inf"), True, "the Kubernetes API has not been reached yet"),
        (0.0, False, "an earlier run is not undone yet"),
    ],
)
def test_agent_is_ready_with_api_contact_and_after_recovery(
    state: HealthState, age_s: float, why: str, *, is_recovered: bool
) -> None:
    state.contact_age_s, state.is_recovered = age_s, is_recovered

    assert state.health.why_unready() == why


# -- over HTTP --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "text", "header"),
    [
        ("GET", "/healthz", 200, "ok\n", None),
        ("GET", "/readyz", 503, "the Kubernetes API has not been heard of for 1000 s\n", None),
        (
            *("GET", "/metrics?name=x", 200, "metric 1\n"),
            ("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),
        ),
        ("GET", "/<script>", 404, "no such page\n", ("Server", "mig-manager")),
        ("HEAD", "/healthz", 200, "", ("Content-Length", "3")),
        *(
            (method, "/healthz", 405, None, ("Allow", "GET, HEAD"))
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS")
        ),
    ],
)
def test_each_request_gets_its_page_or_a_refusal_with_its_header(
    state: HealthState,
    method: str,
    path: str,
    status: int,
    text: str | None,
    header: tuple[str, str] | None,
) -> None:
    state.contact_age_s = 1000.0
    with serving(state) as port:
        found_status, found_text, headers = ask(port, path, method=method)

    assert found_status == status
    assert text in (found_text, None)
    assert header is None or headers[header[0]] == header[1]


def test_by_default_every_address_is_served(state: HealthState) -> None:
    with serving(state, address="") as port:
        assert ask(port, "/healthz")[0] == 200
        if socket.has_dualstack_ipv6():
            with socket.create_connection(("::1", port), timeout=20):
                pass


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_port_in_use_and_foreign_address_are_usage_errors(
    state: HealthState, address: str
) -> None:
    with serving(state) as port:
        again = web_server.served(state.health, bytes, address=address, port=port)
        with pytest.raises(errors.UsageError, match=rf"^cannot listen on {address}:{port}: "):
            again.__enter__()


def test_silent_clients_do_not_block_a_probe(state: HealthState) -> None:
    with serving(state) as port, contextlib.ExitStack() as idle:
        # Those of tests before may still be ending.
        others = threading.active_count()
        for _ in range(48):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        assert ask(port, "/healthz")[0] == 200
        most = others + 32  # 16 are open, and so many may be closing
        # The thread of a closed connection ends by itself, soon.
        waiting.until(lambda: threading.active_count() < most, "closed connections to end")


def test_a_connection_that_lasts_too_long_is_cut_off(
    state: HealthState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "_CONNECTION_S", 0.0)
    with serving(state) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        assert slow.recv(1) == b""


def test_a_client_that_disconnects_early_does_not_disturb_the_server(state: HealthState) -> None:
    with serving(state) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as rude:
            rude.sendall(b"GET /metr")
        assert ask(port, "/healthz")[0] == 200


def test_a_page_that_fails_closes_only_its_own_connection(state: HealthState) -> None:
    def broken() -> bytes:
        raise RuntimeError("no metrics today")

    with serving(state, exposition=broken) as port:
        with pytest.raises(http.client.HTTPException):
            ask(port, "/metrics")
        assert ask(port, "/healthz")[0] == 200


def test_the_port_is_closed_when_the_context_ends(state: HealthState) -> None:
    with serving(state) as port:
        pass

    with pytest.raises(ConnectionRefusedError):
        ask(port, "/healthz")
