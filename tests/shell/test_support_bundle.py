"""``mig-manager support-bundle``: what is in the archive, what never is, and what goes missing."""

import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping

import hypothesis
import hypothesis.strategies as st
import pytest
from starlette import requests, responses, types

from mig_manager.cli.support_bundle import bundle_content
from mig_manager.sandbox.apiserver import server
from tests.rigs import api_objects, contract
from tests.rigs.shell import commandline, plugin_rig
from tests.shell import terminal

SPEC = ("--simulate", "1xA30")
ALWAYS = {
    *("manifest.json", "versions.json", "status.json", "status.txt"),
    *("doctor.json", "doctor.txt", "settings.json", "layouts.yaml"),
}
OF_CLUSTER = {"node.json", "events.json", "agent.json", "agent.log", "agent-layouts.yaml"}
AT = "2026-01-01T00:00:00Z"
LAYOUTS = "version: v1\nmig-configs:\n  mine: [{devices: all, mig-enabled: false}]\n"


class BundledCluster:
    """A cluster of a node, its agent's pod, and what kubelet has of the agent's log."""

    def __init__(self, kubeconfig: pathlib.Path) -> None:
        self.log = f"{AT} started\n"
        self.silent = ""  # part of the paths that are never answered
        self.server = server.ApiServer(middleware=self._middleware)
        self.kubeconfig = kubeconfig

    def _middleware(self, app: types.ASGIApp) -> types.ASGIApp:
        async def call(scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
            http = requests.Request(scope, receive)
            if self.silent and self.silent in http.url.path:
                while (await receive())["type"] != "http.disconnect":
                    pass
            elif not http.url.path.endswith("/log"):
                await app(scope, receive, send)
            elif "previous" in http.query_params:
                refusal = {"kind": "Status", "message": "previous terminated container not found"}
                await responses.JSONResponse(refusal, 400)(scope, receive, send)
            else:
                await responses.PlainTextResponse(self.log)(scope, receive, send)

        return call

    def fill(self, *, secret: str = "", status: str = "", layouts: str = LAYOUTS) -> None:
        """Create the objects; foreign parts of them have the secret."""
        failed = {"state": "failed", "as_written": 1, "message": f"the hook said: token={secret}"}
        node = plugin_rig.node(
            "n1", requested="mine", state=None, labels={"example.com/team": "other"}
        )
        node["metadata"]["annotations"] = {
            "mig-manager.io/status": status or json.dumps(failed),
            "example.com/login": secret,
        }
        node["spec"] = {"taints": [{"key": "example.com/x", "effect": "NoSchedule"}]}
        agent = plugin_rig.pod("mig-manager-x", "n1")
        labels = {"app.kubernetes.io/name": "mig-manager"}
        agent["metadata"] |= {"namespace": "default", "labels": labels}
        environ = {"DRAIN_POLICY": "none", "MIG_MANAGER_DRAIN_TIMEOUT_S": "7", "OTHER": secret}
        agent["spec"]["containers"][0] |= {
            "name": "mig-manager",
            "args": ["agent", "--drain-policy=none"],
            "env": [{"name": name, "value": value} for name, value in environ.items()],
        }
        volume = {"name": "config", "configMap": {"name": "mig-manager-config"}}
        agent["spec"]["volumes"] = [volume]
        events = [api_objects.an_event("n1", "Applied", f"Bearer {secret}", at=AT)]
        kubelet = {"source": {"component": "kubelet"}, "reportingComponent": "kubelet"}
        events.append(api_objects.an_event("n1", "Rebooted", "no part of ours", at=AT, **kubelet))
        for event in events:
            event["metadata"]["namespace"] = "default"
        text = f"# password: {secret}\n{layouts}"
        config = api_objects.a_config_map(text, "default/mig-manager-config")
        for obj in (node, agent, config, *events):
            metadata = obj["metadata"]
            key = (f"{obj['kind'].lower()}s", metadata.get("namespace", ""), metadata["name"])
            self.server.store.remove(key)
            self.server.store.create(obj)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BundledCluster]:
    bundled_cluster = BundledCluster(tmp_path_factory.mktemp("cluster") / "kubeconfig")
    with server.serve(bundled_cluster.server):
        bundled_cluster.fill()
        bundled_cluster.server.kubeconfig(bundled_cluster.kubeconfig)
        yield bundled_cluster


def bundle(
    shell: commandline.Shell, folder: pathlib.Path, *argv: str, **environ: str
) -> Mapping[str, str]:
    path = folder / "bundle.tar.gz"
    answer = shell("support-bundle", *SPEC, "--output-file", str(path), *argv, **environ)
    assert answer.status == 0
    return files_in(path.read_bytes())


def of_node(
    cluster: BundledCluster,
    shell: commandline.Shell,
    folder: pathlib.Path,
    *argv: str,
    **environ: str,
) -> Mapping[str, str]:
    options = ("-n", "n1", "--kubeconfig", str(cluster.kubeconfig))
    return bundle(shell, folder, *options, *argv, **environ)


def files_in(content: bytes) -> Mapping[str, str]:
    """Return the files by name without their one folder."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        entries = tar.getmembers()
        assert len({each.name.partition("/")[0] for each in entries}) == 1
        assert {(each.mode, each.uid, each.isfile()) for each in entries} == {(0o600, 0, True)}
        return {
            each.name.partition("/")[2]: (tar.extractfile(each) or io.BytesIO()).read().decode()
            for each in entries
        }


def missing(files: Mapping[str, str]) -> Mapping[str, str]:
    reasons: Mapping[str, str] = json.loads(files["manifest.json"])["missing"]
    return reasons


def test_only_its_owner_may_read_the_archive(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    former = tmp_path / "bundle.tar.gz"
    former.touch(0o644)

    bundle(shell, tmp_path)

    assert former.stat().st_mode & 0o777 == 0o600


def test_the_manifest_is_first_and_lists_sizes_and_missing_files(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    files = bundle(shell, tmp_path)
    manifest = json.loads(files["manifest.json"])

    assert next(iter(files)) == "manifest.json"
    assert manifest["files"] == {
        name: len(text.encode()) for name, text in files.items() if name != "manifest.json"
    }
    assert manifest["isSimulated"] is True
    assert missing(files)["node.json"] == "no kubeconfig; name one with --kubeconfig"
    assert missing(files)["units.log"] == "the GPUs are simulated"


def test_bundle_of_a_machine_has_its_gpus_checks_and_versions(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    files = bundle(shell, tmp_path)
    status, doctor = json.loads(files["status.json"]), json.loads(files["doctor.json"])

    assert set(files) == ALWAYS
    contract.check("Status", status)
    contract.check("Doctor", doctor)
    assert status["gpus"][0]["name"] == "NVIDIA A30"
    assert "NVIDIA A30" in files["status.txt"]
    assert doctor["isGood"] is True
    assert files["doctor.txt"].startswith("CHECK ")
    assert json.loads(files["versions.json"])["driver"]


def test_bundle_of_a_node_has_its_events_and_the_agents_log_and_layouts(
    cluster: BundledCluster, shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    files = of_node(cluster, shell, tmp_path)

    assert set(files) == ALWAYS | OF_CLUSTER
    assert [each["reason"] for each in json.loads(files["events.json"])] == ["Applied"]
    assert json.loads(files["agent.json"])[0]["name"] == "mig-manager-x"
    assert files["agent.log"] == f"==> default/mig-manager-x mig-manager <==\n{cluster.log}"
    assert "mine" in files["agent-layouts.yaml"]
    assert "previous terminated container" in missing(files)["agent-previous.log"]


def test_the_node_object_is_bundled_without_foreign_metadata(
    cluster: BundledCluster, shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    node = json.loads(of_node(cluster, shell, tmp_path)["node.json"])

    assert node["labels"]["nvidia.com/mig.config"] == "mine"
    assert "example.com/team" not in node["labels"]
    assert node["annotations"].keys() == {"mig-manager.io/status"}
    published = node["annotations"]["mig-manager.io/status"]
    assert published.items() >= {"state": "failed", "as_written": 1}.items()
    assert node["taints"] == [{"key": "example.com/x", "effect": "NoSchedule"}]


def test_settings_of_a_node_are_those_of_its_agent_with_their_origin(
    cluster: BundledCluster, shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    settings = json.loads(of_node(cluster, shell, tmp_path)["settings.json"])

    assert settings["readFrom"] == "the agent's pod"
    assert (
        settings["options"].items()
        >= {
            "drain-policy": {"value": "none", "origin": "--drain-policy"},
            "drain-timeout-s": {"value": "7", "origin": "MIG_MANAGER_DRAIN_TIMEOUT_S"},
            "lock-timeout-s": {"value": "30", "origin": "default"},
        }.items()
    )


@pytest.mark.slow
def test_without_a_pod_the_settings_are_those_of_the_variables_here(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    files = bundle(shell, tmp_path, MIG_MANAGER_DRAIN_TIMEOUT_S="8")
    settings = json.loads(files["settings.json"])

    assert settings["readFrom"] == "the variables here"
    assert settings["options"]["drain-timeout-s"] == {
        "value": "8",
        "origin": "MIG_MANAGER_DRAIN_TIMEOUT_S",
    }


def test_an_interrupted_change_is_shown_with_its_journal(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    journal = tmp_path / "journal.json"
    journal.write_text('{"version": 1}')

    files = bundle(shell, tmp_path, "--journal-file", str(journal))

    assert files["journal.json"] == '{"version": 1}'
    assert "journal-file" in files["doctor.txt"]


def test_the_value_of_a_secret_variable_is_redacted(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    journal = tmp_path / "journal.json"
    journal.write_text('{"version": 1, "config": "correct-horse"}')

    files = bundle(shell, tmp_path, "--journal-file", str(journal), BACKUP_API_KEY="correct-horse")

    assert "correct-horse" not in files["journal.json"]


def test_a_silent_source_does_not_fail_the_bundle(
    cluster: BundledCluster,
    shell: commandline.Shell,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "silent", "/log")
    files = of_node(cluster, shell, tmp_path, "--timeout-s", "0.5")

    assert "agent.log" not in files
    assert "agent.log" in missing(files)


@pytest.fixture
def silent_file() -> Iterator[str]:
    """A pipe like a shell's ``<(...)``, whose writer writes nothing."""
    reading, writing = os.pipe()
    yield f"/dev/fd/{reading}"
    os.close(writing)  # ends the threads that read it
    os.close(reading)


def test_a_hung_source_is_abandoned_at_the_deadline(
    shell: commandline.Shell,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    silent_file: str,
) -> None:
    monkeypatch.setattr(bundle_content, "_MARGIN_S", 0.5)

    files = bundle(shell, tmp_path, "-f", silent_file, "--timeout-s", "0.5")

    assert "layouts.yaml" not in files
    assert missing(files)["layouts.yaml"] == "no answer within 1.5 s"


@pytest.mark.slow
def test_without_silent_sources_only_their_own_files_are_missing(
    cluster: BundledCluster,
    shell: commandline.Shell,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    silent_file: str,
) -> None:
    # The other sources have the same time, and other programs may keep the processors busy.
    monkeypatch.setattr(cluster, "silent", "/log")

    files = of_node(cluster, shell, tmp_path, "-f", silent_file, "--timeout-s", "20")

    assert set(files) == (ALWAYS | OF_CLUSTER) - {"agent.log", "layouts.yaml"}
    assert "no answer within 25 s" in files["doctor.txt"]


def test_a_bundle_lacks_only_the_files_that_the_api_refuses(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    files = bundle(shell, tmp_path, "-n", "n1", "--kubeconfig", "/nonexistent")

    assert set(files) == ALWAYS
    assert "/nonexistent" in missing(files)["node.json"]


@pytest.mark.slow
def test_the_end_of_an_overlong_log_is_kept(
    cluster: BundledCluster,
    shell: commandline.Shell,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bundle_content, "_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(cluster, "log", "line\n" * (1 << 18) + "the last one\n")
    files = of_node(cluster, shell, tmp_path)

    assert len(files["agent.log"]) == 1 << 20
    assert files["agent.log"].endswith("line\nthe last one\n")
    assert missing(files)["the start of agent.log"] == "longer than 1 MiB"


@pytest.mark.slow
def test_the_default_name_has_the_node_and_the_time(
    shell: commandline.Shell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = shell("support-bundle", *SPEC, NODE_NAME="n1")
    (path,) = tmp_path.glob("mig-manager-support-n1-*Z.tar.gz")

    assert answer.out.startswith(f"{path.name}: 8 files, ")
    assert "not in it: journal.json" in answer.out
    assert files_in(path.read_bytes()).keys() == ALWAYS


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "pipe"])
def test_on_standard_output_is_the_archive_alone(tmp_path: pathlib.Path, *, is_file: bool) -> None:
    path = tmp_path / "redirected"
    with path.open("wb") as file:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-m", "mig_manager", "support-bundle", *SPEC, "--output-file", "-"],
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
            stdout=file if is_file else subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=True,
        )

    files = files_in(path.read_bytes() if is_file else done.stdout)

    assert files.keys() == ALWAYS
    assert b"mig-manager: standard output: 8 files" in done.stderr
    assert b"  " not in done.stderr  # each sentence is one line


def test_an_archive_is_not_written_to_a_terminal(tmp_path: pathlib.Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    argv = ("support-bundle", *SPEC, "--output-file", "-")

    shown = terminal.run(argv, columns=80, environ=environ, status=2)

    assert "redirect it to a file" in shown


@pytest.mark.slow
def test_a_name_that_could_drive_a_terminal_stays_out_of_the_archives_name(
    shell: commandline.Shell, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert shell("support-bundle", *SPEC, "-n", "../a\x1b[2J\nb").status == 0
    assert [path.name.rpartition("-")[0] for path in tmp_path.glob("*.tar.gz")] == [
        "mig-manager-support-.._a_[2J_b"
    ]


ODD_NUMBERS = '{"attempt": NaN, "other": [1e999, Infinity]}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "name", "content"),
    [
        pytest.param({"layouts": "# \ud800"}, "agent-layouts.yaml", " \\ud800", id="no Unicode"),
        pytest.param(
            {"status": ODD_NUMBERS}, "node.json", json.dumps(ODD_NUMBERS), id="no JSON's numbers"
        ),
    ],
)
def test_invalid_content_stays_text_and_does_not_fail_the_bundle(
    cluster: BundledCluster,
    shell: commandline.Shell,
    tmp_path: pathlib.Path,
    fields: dict[str, str],
    name: str,
    content: str,
) -> None:
    cluster.fill(**fields)
    try:
        files = of_node(cluster, shell, tmp_path)
    finally:
        cluster.fill()

    assert set(files) == ALWAYS | OF_CLUSTER
    assert content in files[name]
    json.loads(files["node.json"], parse_constant=pytest.fail)


# -- secrets ----------------------------------------------------------------------------------

_SECRETS = st.text(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_~.-", min_size=12
).filter(lambda text: text[0].isalnum())


@pytest.mark.slow
@hypothesis.settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(secret=_SECRETS)
def test_a_planted_secret_never_gets_in(
    secret: str, cluster: BundledCluster, shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    token, other = f"{secret}KNOWN", f"{secret}OTHER"
    cluster.server.kubeconfig(cluster.kubeconfig, token=token)
    cluster.fill(secret=other)
    cluster.log = (
        f"sent {token}\nAuthorization: Bearer {other}\nMY_TOKEN={other}\n"
        f"https://user:{other}@example.com/\n"
    )
    layouts = tmp_path / "layouts.yaml"
    layouts.write_text(f"# api_key: '{other}'\n{LAYOUTS}")
    journal = tmp_path / "journal.json"
    journal.write_text(json.dumps({"client-key-data": other, "message": token}))

    files = of_node(
        *(cluster, shell, tmp_path, "-f", str(layouts), "--journal-file", str(journal)),
        SOMEBODYS_PASSWORD=token,
        SOMETHING_ELSE=other,
    )

    assert set(files) == ALWAYS | OF_CLUSTER | {"journal.json"}
    assert not [name for name, text in files.items() if token in text or other in text]
    assert not [name for name in files if name.endswith(".json") and not json.loads(files[name])]
