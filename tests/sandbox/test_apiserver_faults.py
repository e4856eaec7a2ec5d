"""Failures on demand: whom they strike, and what the client then sees."""

import http.client
from collections.abc import Iterator

import pytest

from testkit import apiserver
from tests.sandbox import apirig

DEADLINE_S = 5


@pytest.fixture
def ask() -> Iterator[apirig.Client]:
    with apirig.serving() as client:
        client.server.store.create(apirig.a_node("n1"))
        yield client


def test_a_fault_can_be_for_one_client_and_one_resource(ask: apirig.Client) -> None:
    client = "a"
    ask.server.inject(apiserver.Fault(token=client, resource="nodes", status=500, times=2))
    as_a = {"authorization": f"Bearer {client}"}

    assert ask("GET", f"{apirig.NODES}/n1").code == 200
    assert ask("GET", apirig.PODS, **as_a).code == 200
    assert ask("GET", f"{apirig.NODES}/n1", **as_a).code == 500
    assert ask("GET", apirig.NODES, **as_a).code == 500


def test_faults_are_counted_until_they_have_struck_unless_they_have_no_end(
    ask: apirig.Client,
) -> None:
    ask.server.inject(apiserver.Fault(method="GET", skip=1, status=503))
    ask.server.inject(apiserver.Fault(method="DELETE", times=None, status=503))
    seen = [ask.server.faults_waiting()]
    for method in ("GET", "GET", "DELETE"):
        ask(method, f"{apirig.NODES}/n1")
        seen.append(ask.server.faults_waiting())

    assert seen == [2, 2, 1, 1]


@pytest.mark.parametrize("query", ["", "?watch=true"])
def test_an_answer_can_be_what_no_api_server_sends(ask: apirig.Client, query: str) -> None:
    ask.server.inject(apiserver.Fault(garbles=True))

    connection = http.client.HTTPConnection(*ask.server.address, timeout=DEADLINE_S)
    connection.request("GET", f"{apirig.NODES}{query}")
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read().startswith(b"<html>")
    connection.close()
