"""The API by way of a program called kubectl; here one of a few lines that plays its part."""

import pathlib
import re
from collections.abc import Iterator

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters import cluster_reader, rest
from mig_manager.adapters.kubectl import Kubectl
from mig_manager.cli.toolkit import console
from mig_manager.core.objects import node_object
from mig_manager.kubectl import main as plugin
from testkit import apiserver
from tests.rigs import programs
from tests.rigs.shell import commandline, plugin_rig

LEFT_BEHIND = '(while [ -e "$0" ]; do sleep 0.1; done)'
"""A process that outlives kubectl and keeps its stderr open, until the end of the test."""


@pytest.fixture
def bin_(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield tmp_path
    (tmp_path / "kubectl").unlink(missing_ok=True)


def replace_kubectl(folder: pathlib.Path, script: str, *, name: str = "kubectl") -> None:
    programs.write_script(folder / name, script)


def client(notes: list[str] | None = None, *options: str, timeout_s: float = 60) -> Kubectl:
    shown = [] if notes is None else notes
    return Kubectl(options, note=shown.append, timeout_s=timeout_s)


def test_get_passes_path_query_and_options_to_kubectl(bin_: pathlib.Path) -> None:
    replace_kubectl(bin_, f'printf "%s\\n" "$@" >{bin_}/asked; echo "{{}}"')

    assert client(None, "--context=a b").get("/api/v1/nodes", {"labelSelector": "a in (b)"}) == {}

    assert (bin_ / "asked").read_text().splitlines() == [
        "--context=a b",
        "get",
        "--raw",
        "/api/v1/nodes?labelSelector=a+in+%28b%29",
    ]


def test_oc_is_used_where_kubectl_is_missing(
    bin_: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(bin_))
    replace_kubectl(bin_, 'echo \'{"kind": "Node"}\'', name="oc")

    assert client().get("/api/v1/nodes/n1") == {"kind": "Node"}


def test_a_login_prompt_is_shown_without_control_characters(bin_: pathlib.Path) -> None:
    replace_kubectl(bin_, "printf 'open a browser \\033[2J\\n\\n' >&2; echo '{}'")
    notes: list[str] = []

    assert client(notes).get("/version") == {}

    assert notes == ["open a browser  [2J"]


FORBIDDEN, UNAVAILABLE = reasons.Reason.FORBIDDEN, reasons.Reason.API_UNAVAILABLE


@pytest.fixture(scope="module")
def server() -> Iterator[apiserver.ApiServer]:
    programs.path_or_skip("kubectl")
    with apiserver.serve() as api_server:
        yield api_server


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (400, reasons.Reason.API_ERROR, "^no$"),
        (401, UNAVAILABLE, "You must be logged in"),
        (403, FORBIDDEN, "^no$"),
        (404, reasons.Reason.API_ERROR, "^no$"),
        (409, reasons.Reason.API_ERROR, "^no$"),
        (410, reasons.Reason.API_ERROR, "^no$"),
        (422, reasons.Reason.API_ERROR, "^The request is invalid: no$"),
        (429, UNAVAILABLE, "^no$"),
        (500, UNAVAILABLE, "^no$"),
        (503, UNAVAILABLE, "^no$"),
    ],
)
def test_a_refusal_that_kubectl_reports_has_a_reason_by_its_kind(
    server: apiserver.ApiServer,
    tmp_path: pathlib.Path,
    status: int,
    reason: reasons.Reason,
    message: str,
) -> None:
    server.inject(apiserver.Fault(verb="get", status=status, message="no"))
    kubectl = client(None, f"--kubeconfig={server.kubeconfig(tmp_path / 'kubeconfig')}")

    with pytest.raises(errors.ClusterError, match=message) as caught:
        kubectl.get("/api/v1/nodes/n1")

    assert caught.value.reason is reason
    assert caught.value.status == (None if status in (401, 500) else status)


def test_what_the_api_finds_invalid_is_an_error_with_its_cause(
    server: apiserver.ApiServer, tmp_path: pathlib.Path
) -> None:
    server.store.create(plugin_rig.node("n1"))
    kubectl = client(None, f"--kubeconfig={server.kubeconfig(tmp_path / 'kubeconfig')}")
    version = kubectl.get("/api/v1/nodes/n1")["metadata"]["resourceVersion"]
    patch = node_object.NodePatch(labels={"nvidia.com/mig.config": "all balanced!"})

    with pytest.raises(errors.ClusterError, match=r'^The Node "n1" .* balanced!') as caught:
        kubectl.patch_node("n1", version, patch)

    assert (caught.value.status, caught.value.reason) == (422, reasons.Reason.API_ERROR)


@pytest.mark.parametrize(
    ("port", "timeout", "message"),
    [
        (1, "60s", "The connection to the server .* was refused"),
        (None, "500ms", "Unable to connect to the server: "),
    ],
    ids=["refused", "silent"],
)
def test_a_server_that_kubectl_cannot_reach_is_unavailable(
    server: apiserver.ApiServer, port: int | None, timeout: str, message: str
) -> None:
    server.inject(apiserver.Fault(path="/silent", stall=True, times=None))
    address = f"http://127.0.0.1:{port or server.address[1]}"
    kubectl = client(None, f"--server={address}", f"--request-timeout={timeout}")

    with pytest.raises(errors.ClusterError, match=message) as caught:
        kubectl.get("/silent")

    assert caught.value.reason is UNAVAILABLE


def test_a_program_that_kubectl_leaves_behind_delays_no_answer(bin_: pathlib.Path) -> None:
    replace_kubectl(bin_, f"echo 'log in' >&2; {LEFT_BEHIND} & echo '{{}}'")
    notes: list[str] = []

    assert client(notes, timeout_s=50).get("/version") == {}

    assert notes == ["log in"]


def at_shell(command: commandline.Main, *words: str) -> commandline.Answer:
    return commandline.run(
        words, {}, command=command, program="kubectl-mig", replace_adapter=console.keep
    )


@pytest.mark.parametrize(
    ("command", "words", "timeout"),
    [
        (plugin.run, ["status"], "30s"),
        (plugin.run, ["status", "--request-timeout=7s"], "7s"),
        (plugin.answer_completion, ["history", ""], "5s"),
        (plugin.answer_completion, ["--request-timeout=7s", "history", ""], "7s"),
    ],
)
def test_every_request_has_a_time_out(
    bin_: pathlib.Path, command: commandline.Main, words: list[str], timeout: str
) -> None:
    replace_kubectl(bin_, f'echo "$@" >>{bin_}/asked; exit 1')

    at_shell(command, *words)

    lines = (bin_ / "asked").read_text().splitlines()
    assert lines
    assert {*re.findall(r"--request-timeout=(\S+)", "\n".join(lines))} == {timeout}
    assert all("--request-timeout" in line for line in lines)


def test_a_hanging_kubectl_does_not_keep_the_prompt_of_a_completion(
    bin_: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_COMPLETION_TIMEOUT_S", 0.2)
    replace_kubectl(bin_, "exec sleep 600")

    assert at_shell(plugin.answer_completion, "history", "").out.splitlines() == [":4"]


def test_a_line_after_the_time_out_does_not_replace_its_message(bin_: pathlib.Path) -> None:
    replace_kubectl(bin_, "timeout 1 yes 'error: late' >&2 & exec sleep 600")

    with pytest.raises(errors.ClusterError, match="did not end within"):
        client(timeout_s=0.2).get("/version")


@pytest.mark.parametrize("answer", ["", "{", "[]", "[" * 3000, '{"items": 7}'])
def test_a_malformed_list_is_a_cluster_error(bin_: pathlib.Path, answer: str) -> None:
    replace_kubectl(bin_, f"echo '{answer}'")

    with pytest.raises(errors.ClusterError):
        cluster_reader.ClusterReader(client().get).select_nodes(None)


def test_a_list_that_repeats_itself_is_an_error(bin_: pathlib.Path) -> None:
    replace_kubectl(bin_, """echo '{"items": [], "metadata": {"continue": "more"}}'""")

    with pytest.raises(errors.ClusterError, match="does not end"):
        list(rest.pages(client().get, "/api/v1/nodes", {}, what="the list"))


@pytest.mark.parametrize(
    ("program", "timeout_s", "message"),
    [
        (b"#!/bin/sh\nexit 1\n", 60.0, "without a message"),
        (b"#!/bin/sh\nexec sleep 600\n", 0.2, r"did not end within 0\.2 s"),
        (f"#!/bin/sh\n{LEFT_BEHIND}; :\n".encode(), 0.2, r"did not end within 0\.2 s"),
        (b"\x7fELF", 60.0, "cannot be run"),
    ],
    ids=["silent", "hanging", "hanging-plugin", "unrunnable"],
)
def test_a_kubectl_that_does_not_work_is_a_cluster_error(
    bin_: pathlib.Path, program: bytes, timeout_s: float, message: str
) -> None:
    (bin_ / "kubectl").write_bytes(program)
    (bin_ / "kubectl").chmod(0o755)

    with pytest.raises(errors.ClusterError, match=message):
        client(timeout_s=timeout_s).get("/version")
