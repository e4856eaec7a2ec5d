"""An open watch request: its events, its end, and what is no event."""

import json
import threading

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, responses
from tests.adapters import kube_rig
from tests.adapters.kube_rig import Handler, Server, Step, failure, lines, refuse, reset, silence

server = kube_rig.server


def event(kind: str = "MODIFIED", /, **fields: object) -> dict[str, object]:
    return {"type": kind, "object": fields}


def watch(kube: api.KubeApi, *, idle_timeout_s: float = 10.0) -> responses.WatchStream:
    query = {"resourceVersion": "7"}
    return kube.watch("/nodes", query=query, timeout_s=300, idle_timeout_s=idle_timeout_s)


def test_events_are_yielded_as_they_come_until_the_server_ends_the_watch(server: Server) -> None:
    server.script = [lines(event(a=1), b"\n", event("BOOKMARK"))]
    with watch(server.kube) as stream:
        assert list(stream) == [event(a=1), event("BOOKMARK")]
    path, _, options = server.seen[0][1].partition("?")
    assert (path, set(options.split("&"))) == (
        "/nodes",
        {"watch=true", "timeoutSeconds=300", "allowWatchBookmarks=true", "resourceVersion=7"},
    )


def test_events_may_be_split_and_joined_by_the_transport(server: Server) -> None:
    text = b"".join(json.dumps(event(a="ü" * n)).encode() + b"\n" for n in range(50))

    def without_chunks(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(text)

    server.script = [lines(*(text[n : n + 7] for n in range(0, len(text), 7))), without_chunks]
    for _ in range(2):
        with watch(server.kube) as stream:
            assert len(list(stream)) == 50


def test_an_expired_resource_version_is_410_also_within_the_stream(server: Server) -> None:
    status = event("ERROR", kind="Status", code=410, message="too old resource version")
    server.script = [refuse(410, "too old"), lines(status)]
    assert failure(watch, server.kube).status == 410
    with watch(server.kube) as stream:
        error = failure(next, stream)
    assert error.status == 410
    assert "too old" in error.message


def test_silence_ends_the_watch_and_sooner_before_the_response(server: Server) -> None:
    server.script = [silence, lines(event(a=1), then=silence)]
    error = failure(watch, server.client(0.2), idle_timeout_s=600)
    assert error.reason is errors.Reason.API_UNAVAILABLE
    with watch(server.kube, idle_timeout_s=0.2) as stream:
        assert next(stream) == event(a=1)
        assert "timed out" in failure(next, stream).message


def test_a_watch_may_be_silent_longer_than_the_request_time_out(server: Server) -> None:
    def late(handler: Handler) -> None:
        handler.server.over.wait(0.4)
        data = json.dumps(event(a=2)).encode() + b"\n"
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    server.script = [lines(event(a=1), then=late)]
    with watch(server.client(0.2), idle_timeout_s=30) as stream:
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
def test_anything_but_whole_events_is_api_unavailable(server: Server, step: Step) -> None:
    server.script = [step]
    with watch(server.kube) as stream:
        assert failure(next, stream).reason is errors.Reason.API_UNAVAILABLE


def test_another_thread_can_interrupt_a_blocked_read_more_than_once(server: Server) -> None:
    server.script = [lines(event(a=1), then=silence)]
    with watch(server.kube, idle_timeout_s=600) as stream:
        assert next(stream) == event(a=1)
        threading.Timer(0.1, stream.interrupt).start()
        assert list(stream) == []
        stream.interrupt()
    stream.interrupt()
