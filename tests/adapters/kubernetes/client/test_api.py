"""KubeApi: requests, their errors and repetitions, and what an open watch yields."""

import contextlib
import gzip
import json
import threading
import tracemalloc
from collections.abc import Callable, Mapping, Sized
from typing import Any

import pytest
from kubernetes.client import configuration as kube_configuration

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, fleet, leases, pods, responses
from mig_manager.core import timing
from tests.adapters.kubernetes import kube_rig
from tests.adapters.kubernetes.kube_rig import (
    Handler,
    KubeServer,
    Step,
    answer,
    cut_off,
    endless,
    failure,
    lines,
    refuse,
    reset,
    silence,
)
from tests.rigs.node import fakes

FORBIDDEN = reasons.Reason.FORBIDDEN
UNAVAILABLE = reasons.Reason.API_UNAVAILABLE
OTHER = reasons.Reason.API_ERROR


def watch(kube: api.KubeApi) -> list[dict[str, Any]]:
    with open_watch(kube) as stream:
        return list(stream)


CALLS: Mapping[str, Callable[[api.KubeApi], object]] = {
    "GET": lambda kube: kube.get("/x", {"fieldSelector": "metadata.name=a"}),
    "POST": lambda kube: kube.post("/x", {"a": 1}),
    "PUT": lambda kube: kube.put("/x", {"a": 2}),
    "DELETE": lambda kube: kube.delete("/x", {"a": 3}),
    "PATCH": lambda kube: kube.patch("/x", {"a": None}),
    "watch": watch,
}


def test_requests_carry_their_query_token_and_body_over_one_connection(
    scripted_server: KubeServer,
) -> None:
    addresses = set()

    def note(handler: Handler) -> None:
        addresses.add(handler.client_address)
        answer({"kind": "Node"})(handler)

    scripted_server.script = [note] * 5
    for name, call in CALLS.items():
        assert name == "watch" or call(scripted_server.kube) == {"kind": "Node"}

    assert [
        (method, path, headers.get("Content-Type"), body and json.loads(body))
        for method, path, headers, body in scripted_server.requests
    ] == [
        ("GET", "/x?fieldSelector=metadata.name%3Da", None, b""),
        ("POST", "/x", "application/json", {"a": 1}),
        ("PUT", "/x", "application/json", {"a": 2}),
        ("DELETE", "/x", "application/json", {"a": 3}),
        ("PATCH", "/x", "application/merge-patch+json", {"a": None}),
    ]
    for _, _, headers, _ in scripted_server.requests:
        assert headers["Authorization"] == f"Bearer {kube_rig.TOKEN}"
        assert headers["User-Agent"] == "mig-manager"
    assert len(addresses) == 1


FAULTS: Mapping[str | int, Step] = {
    "reset": reset,
    "cut off": cut_off,
    **{code: refuse(code) for code in (400, 401, 403, 404, 409, 410, 422, 429, 500, 503)},
}
IDEMPOTENT: set[str | int] = {"reset", "cut off", 429, 503}
"""With these statuses a server says that it has not acted."""
SENT_AGAIN_AFTER: Mapping[str, set[str | int]] = {
    "GET": {500, *IDEMPOTENT},
    "POST": set(),
    "PUT": set(),
    "DELETE": IDEMPOTENT,
    "PATCH": IDEMPOTENT,
    "watch": set(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_request_is_retried_only_where_that_may_help_and_is_safe(
    scripted_server: KubeServer, call: str
) -> None:
    sent_again = set()
    for fault, step in FAULTS.items():
        scripted_server.script = [step, answer()]
        with contextlib.suppress(errors.ClusterError):
            CALLS[call](scripted_server.kube)
        if not scripted_server.script:
            sent_again.add(fault)

    assert sent_again == SENT_AGAIN_AFTER[call]


def test_the_attempts_end_after_a_few_with_the_last_error(scripted_server: KubeServer) -> None:
    scripted_server.script = [refuse(503, "still down")] * 50
    assert "still down" in failure(scripted_server.kube.get, "/x").message
    assert 2 < len(scripted_server.requests) < 10
    assert len(scripted_server.pauses) == len(scripted_server.requests) - 1


def test_starting_server_is_unavailable_until_it_grants_a_request(
    scripted_server: KubeServer,
) -> None:
    scripted_server.script = [reset] * 4
    assert failure(scripted_server.kube.get, "/x").reason is UNAVAILABLE
    scripted_server.script = [refuse(403)] * 5
    assert failure(scripted_server.kube.post, "/x", {}).reason is UNAVAILABLE
    assert failure(scripted_server.kube.get, "/x").reason is UNAVAILABLE
    assert scripted_server.script == []

    scripted_server.script = [refuse(403), answer(), refuse(403)]
    scripted_server.kube.get("/x")
    assert failure(scripted_server.kube.get, "/x").reason is FORBIDDEN


def test_closing_ends_the_pause_between_attempts(scripted_server: KubeServer) -> None:
    client = api.KubeApi.at(scripted_server.url, request_timeout_s=30.0)
    scripted_server.script = [refuse(503, after=9)] * 9
    threading.Timer(0.1, client.close).start()
    failure(client.get, "/x")
    assert len(scripted_server.requests) <= 2


def test_the_servers_retry_after_is_honoured_unless_it_is_long_or_invalid(
    scripted_server: KubeServer,
) -> None:
    scripted_server.script = [refuse(429, after=3), refuse(503, after=60)]
    assert failure(scripted_server.kube.get, "/x").retry_after_s == 60.0
    assert scripted_server.pauses == [3.0]
    for after in ("1e999", "nan", "-1", "Fri, 31 Dec 9999 23:59:59 GMT"):
        scripted_server.script = [refuse(503, after=after)]
        assert failure(scripted_server.kube.post, "/x", {}).retry_after_s is None


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ((403,), FORBIDDEN),
        ((302, 404, 409, 410, 422), OTHER),
        ((401, 429, 500, 503, 599), UNAVAILABLE),
    ],
)
def test_a_status_becomes_a_reason_and_its_causes_are_explained(
    scripted_server: KubeServer, statuses: tuple[int, ...], reason: reasons.Reason
) -> None:
    for status in statuses:
        scripted_server.script = [refuse(status, "No.", causes=("The budget web needs 1.",))]
        error = failure(scripted_server.kube.post, "/x", {})
        assert isinstance(error, responses.ApiError)
        assert (error.status, error.reason) == (status, reason)
        assert error.explanation == "No. The budget web needs 1."
        assert error.message.endswith("POST /x: No. The budget web needs 1.")
        assert kube_rig.TOKEN not in repr(error)


def test_a_redirect_is_not_followed_with_our_token(scripted_server: KubeServer) -> None:
    scripted_server.script = [
        answer(status=307, headers={"Location": f"{scripted_server.url}/elsewhere"})
    ]
    failure(scripted_server.kube.get, "/x")
    assert [path for _, path, _, _ in scripted_server.requests] == ["/x"]


def test_a_long_error_page_is_quoted_in_part(scripted_server: KubeServer) -> None:
    scripted_server.script = [answer(b"<html>" + b"x" * 5000, status=404)]
    error = failure(scripted_server.kube.get, "/x")
    assert "<html>xx" in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"kind": ', b'{"a":' * 100_000])
def test_a_response_that_is_not_an_object_is_an_error(
    scripted_server: KubeServer, body: bytes
) -> None:
    scripted_server.script = [answer(body), answer(body, status=404)]
    assert "not a JSON object" in failure(scripted_server.kube.post, "/x", {}).message
    assert failure(scripted_server.kube.get, "/x").status == 404


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [(200, OTHER, "more than 64 MiB"), (403, FORBIDDEN, "too large")],
)
def test_an_endless_response_is_read_in_part_and_not_requested_again(
    scripted_server: KubeServer, status: int, reason: reasons.Reason, words: str
) -> None:
    scripted_server.script = [endless(status, b" " * (1 << 20))]
    error = failure(scripted_server.kube.get, "/x")
    assert words in error.message
    assert (error.status, error.reason) == (status, reason)


@pytest.mark.parametrize("fault", [reset, silence, cut_off, endless(200, b" ", pause_s=0.01)])
def test_an_incomplete_response_is_api_unavailable(
    scripted_server: KubeServer, fault: Step
) -> None:
    scripted_server.script = [fault]
    error = failure(scripted_server.client(0.2).post, "/x", {})
    assert (error.status, error.reason) == (None, UNAVAILABLE)


def test_a_compressed_response_is_not_decompressed(scripted_server: KubeServer) -> None:
    packed = gzip.compress(b'{"a": "' + b" " * (80 << 20) + b'"}')
    scripted_server.script = [answer(packed, headers={"Content-Encoding": "gzip"})]
    tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    message = failure(scripted_server.kube.post, "/x", {}).message
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert "not a JSON object" in message
    assert peak < 40 << 20


def test_requests_beyond_the_rate_limit_wait(scripted_server: KubeServer) -> None:
    configuration = kube_configuration.Configuration()
    configuration.host = scripted_server.url
    limit = timing.TokenBucket(burst=2, pause_s=1000.0)
    client = api.KubeApi(configuration, sleep=scripted_server.pauses.append, limit=limit)
    for _ in range(4):
        client.get("/version")
    client.close()
    assert scripted_server.pauses == pytest.approx([1000.0, 2000.0], abs=60.0)


# -- an open watch ----------------------------------------------------------------------------


def event(kind: str = "MODIFIED", /, **fields: object) -> dict[str, object]:
    return {"type": kind, "object": fields}


def open_watch(kube: api.KubeApi, *, idle_timeout_s: float = 10.0) -> responses.WatchStream:
    query = {"resourceVersion": "7"}
    return kube.watch("/nodes", query=query, timeout_s=300, idle_timeout_s=idle_timeout_s)


def test_events_are_yielded_as_they_come_until_the_server_ends_the_watch(
    scripted_server: KubeServer,
) -> None:
    scripted_server.script = [lines(event(a=1), b"\n", event("BOOKMARK"))]
    with open_watch(scripted_server.kube) as stream:
        assert list(stream) == [event(a=1), event("BOOKMARK")]
    path, _, options = scripted_server.requests[0][1].partition("?")
    assert (path, set(options.split("&"))) == (
        "/nodes",
        {"watch=true", "timeoutSeconds=300", "allowWatchBookmarks=true", "resourceVersion=7"},
    )


def test_events_may_be_split_and_joined_by_the_transport(scripted_server: KubeServer) -> None:
    text = b"".join(json.dumps(event(a="ü" * n)).encode() + b"\n" for n in range(50))

    def without_chunks(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(text)

    scripted_server.script = [
        lines(*(text[n : n + 7] for n in range(0, len(text), 7))),
        without_chunks,
    ]
    for _ in range(2):
        with open_watch(scripted_server.kube) as stream:
            assert len(list(stream)) == 50


def test_an_expired_resource_version_is_410_also_within_the_stream(
    scripted_server: KubeServer,
) -> None:
    status = event("ERROR", kind="Status", code=410, message="too old resource version")
    scripted_server.script = [refuse(410, "too old"), lines(status)]
    assert failure(open_watch, scripted_server.kube).status == 410
    with open_watch(scripted_server.kube) as stream:
        error = failure(next, stream)
    assert error.status == 410
    assert "too old" in error.message


def test_silence_ends_the_watch_and_sooner_before_the_response(
    scripted_server: KubeServer,
) -> None:
    scripted_server.script = [silence, lines(event(a=1), then=silence)]
    error = failure(open_watch, scripted_server.client(0.2), idle_timeout_s=600)
    assert error.reason is reasons.Reason.API_UNAVAILABLE
    with open_watch(scripted_server.kube, idle_timeout_s=2.0) as stream:
        assert next(stream) == event(a=1)
        assert "timed out" in failure(next, stream).message


def test_a_watch_may_be_silent_longer_than_the_request_time_out(
    scripted_server: KubeServer,
) -> None:
    def late(handler: Handler) -> None:
        handler.server.over.wait(2.5)
        data = json.dumps(event(a=2)).encode() + b"\n"
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    scripted_server.script = [lines(event(a=1), then=late)]
    with open_watch(scripted_server.client(2.0), idle_timeout_s=30) as stream:
        assert list(stream) == [event(a=1), event(a=2)]


def not_a_chunk(handler: Handler) -> None:
    handler.wfile.write(b"zz\r\n")
    handler.close_connection = True


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lines(b'{"type": "MODIF', then=reset), id="reset in an event"),
        pytest.param(lines(b'{"type": "MODIF'), id="ended in an event"),
        pytest.param(lines(b"<html>\n"), id="not JSON"),
        pytest.param(lines(b"[]\n"), id="a list"),
        pytest.param(lines(b'{"type":' * 100_000 + b"\n"), id="nested too deeply"),
        pytest.param(lines(b'{"type": "MODIFIED"}\n'), id="no object"),
        pytest.param(lines(b"x" * 1000, then=not_a_chunk), id="not a chunk"),
        pytest.param(lines(*([b"x" * (1 << 20)] * 9), then=silence), id="an endless line"),
    ],
)
def test_anything_but_whole_events_is_api_unavailable(
    scripted_server: KubeServer, step: Step
) -> None:
    scripted_server.script = [step]
    with open_watch(scripted_server.kube) as stream:
        assert failure(next, stream).reason is reasons.Reason.API_UNAVAILABLE


def test_another_thread_can_interrupt_a_blocked_read_more_than_once(
    scripted_server: KubeServer,
) -> None:
    scripted_server.script = [lines(event(a=1), then=silence)]
    with open_watch(scripted_server.kube, idle_timeout_s=600) as stream:
        assert next(stream) == event(a=1)
        threading.Timer(0.1, stream.interrupt).start()
        assert list(stream) == []
        stream.interrupt()
    stream.interrupt()


def list_pods(kube: api.KubeApi) -> Sized:
    return pods.KubeWorkloads(kube, node_name="n1", clock=fakes.FakeClock()).list()


def list_leases(kube: api.KubeApi) -> Sized:
    return leases.Leases(kube, "mig-manager", fakes.FakeClock()).list(lambda _name: True)


def list_nodes(kube: api.KubeApi) -> Sized:
    nodes = fleet.Fleet(kube, selector="")
    nodes.list()
    return nodes.nodes()


@pytest.mark.parametrize("read", [list_pods, list_leases, list_nodes])
def test_a_list_without_items_is_empty_and_a_malformed_one_an_error(
    scripted_server: KubeServer, read: Callable[[api.KubeApi], Sized]
) -> None:
    contents: list[object] = [None, [{}]]
    for items in contents:
        listed = {"metadata": {"resourceVersion": "1"}, "items": items}
        scripted_server.script.append(answer(listed))

    assert len(read(scripted_server.kube)) == 0
    assert "is malformed" in failure(read, scripted_server.kube).message
