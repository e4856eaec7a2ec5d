"""The ways to a cluster and its credentials, each with a part of the official client."""

import base64
import contextlib
import json
import logging
import pathlib
import ssl
import sys
import time
from typing import Any

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, credentials
from tests.adapters.kubernetes import kube_rig
from tests.adapters.kubernetes.kube_rig import KubeServer, answer, failure, refuse
from tests.rigs import programs
from tests.rigs.shell import commandline

HEAVY = frozenset(
    {
        "aiohttp",
        "asyncio.events",
        "google.protobuf",
        "importlib.metadata._meta",
        "kubernetes.client.api_client",
        "kubernetes.client.models.v1_node",
        "kubernetes.dynamic",
        "oauthlib.oauth2.rfc6749",
        "pydantic",
        "requests",
        "requests_oauthlib.oauth2_session",
    }
)
"""What the client's package files would import."""
BY_FILES = """
import sys
from mig_manager.adapters.kubernetes import api
for path in sys.argv[1:]:
    api.KubeApi.connect(kubeconfig=path).get("/version")
"""
IN_A_POD = """
service_account = sys.modules["kubernetes.config.incluster_config"]
service_account.SERVICE_TOKEN_FILENAME, service_account.SERVICE_CERT_FILENAME = {files}
client = api.KubeApi.connect(kubeconfig=None)
client.get("/version")
open(service_account.SERVICE_TOKEN_FILENAME, "w").write("rotated")
client.get("/again")
"""
THE_REST = """
import importlib.metadata, kubernetes
assert kubernetes.dynamic.DynamicClient and kubernetes.config.load_config
assert kubernetes.client.V1Node(metadata={'name': 'n'}).metadata.name == 'n'
assert kubernetes.utils.parse_quantity('1k') == 1000
assert importlib.metadata.version('urllib3')
"""


def loaded_by(script: str, *argv: str, then: str = "", **environ: str) -> set[str]:
    """Run a script in a new process; return what that has loaded of what is heavy."""
    listing = f"print(*(name for name in sys.modules if name in {set(HEAVY)!r}))\n"
    command = (sys.executable, "-c", script + listing + then, *argv)
    done = programs.run(*command, cwd=None, **environ)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def by_plugin(**status: str) -> dict[str, Any]:
    """Return a user whose credentials a program prints."""
    version = "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    return {
        "exec": {"command": "/bin/echo", "args": [json.dumps(credential)], "apiVersion": version}
    }


def identity(expires: float) -> str:
    parts = ({"alg": "none"}, {"exp": int(expires)})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in parts]
    return ".".join([*(text.rstrip("=") for text in texts), "signature"])


def openid(scripted_server: KubeServer, token: str) -> dict[str, Any]:
    config = {
        "client-id": "me",
        "client-secret": "secret",
        "id-token": token,
        "refresh-token": "again",
        "idp-issuer-url": scripted_server.url,
    }
    return {"auth-provider": {"name": "oidc", "config": config}}


def test_token_plugin_and_valid_identity_load_little_of_the_client(
    scripted_server: KubeServer, tmp_path: pathlib.Path
) -> None:
    token = identity(time.time() + 9999)
    users = [{"token": "a"}, by_plugin(token="fresh"), openid(scripted_server, token)]  # noqa: S106
    paths = [
        kube_rig.kubeconfig(tmp_path / str(number), {"server": scripted_server.url}, user)
        for number, user in enumerate(users)
    ]

    assert loaded_by(BY_FILES, *paths) == set()
    assert scripted_server.credentials() == [
        ("/version", "Bearer a"),
        ("/version", "Bearer fresh"),
        ("/version", f"Bearer {token}"),
    ]


@pytest.mark.slow
def test_expired_identity_is_renewed_and_the_client_stays_importable(
    scripted_server: KubeServer, tmp_path: pathlib.Path
) -> None:
    renewed = identity(time.time() + 9999)
    scripted_server.pages["/.well-known/openid-configuration"] = {
        "token_endpoint": scripted_server.url + "/token"
    }
    scripted_server.pages["/token"] = {
        "access_token": "x",
        "token_type": "bearer",
        "id_token": renewed,
        "refresh_token": "once more",
    }
    user = openid(scripted_server, identity(1))
    path = kube_rig.kubeconfig(tmp_path / "config", {"server": scripted_server.url}, user)

    loaded = loaded_by(BY_FILES, path, then=THE_REST, OAUTHLIB_INSECURE_TRANSPORT="1")

    assert {"requests", "kubernetes.client.api_client"} <= loaded
    assert "kubernetes.dynamic" not in loaded
    assert scripted_server.credentials()[-1] == ("/version", f"Bearer {renewed}")


def make_certificate(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Make a certificate of a server or a client; return the files of it and of its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    programs.output(
        programs.path_or_skip("openssl"),
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", key, "-out", certificate),
    )
    return certificate, key


def tls_context(
    certificate: pathlib.Path, key: pathlib.Path, *clients: pathlib.Path
) -> ssl.SSLContext:
    """Return a server's context; with ``clients`` it requires one of their certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for each in clients:
        context.load_verify_locations(each)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def data(path: pathlib.Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def test_certificate_and_rotated_token_load_little_of_the_client(tmp_path: pathlib.Path) -> None:
    (certificate, key), token = make_certificate(tmp_path, "test"), tmp_path / "token"
    token.write_text("mounted")

    with (
        KubeServer(tls_context(certificate, key)) as in_cluster,
        KubeServer(tls_context(certificate, key, certificate)) as other,
    ):
        in_cluster.script = [refuse(401), answer()]
        path = kube_rig.kubeconfig(
            tmp_path / "config",
            {"server": other.url, "certificate-authority-data": data(certificate)},
            {"client-certificate-data": data(certificate), "client-key-data": data(key)},
        )
        loaded = loaded_by(
            BY_FILES + IN_A_POD.format(files=(str(token), str(certificate))),
            path,
            KUBERNETES_SERVICE_HOST="127.0.0.1",
            KUBERNETES_SERVICE_PORT=str(in_cluster.server_port),
        )

    assert loaded == set()
    assert other.credentials() == [("/version", None)]
    assert in_cluster.credentials() == [
        ("/version", "bearer mounted"),
        ("/again", "bearer mounted"),
        ("/again", "bearer rotated"),
    ]


@pytest.mark.parametrize("suffix", ["", "-data"], ids=["by path", "inline"])
def test_renewed_client_certificate_is_used_after_a_401(
    tmp_path: pathlib.Path, suffix: str
) -> None:
    pairs = {name: make_certificate(tmp_path, name) for name in ("old", "new")}
    of_server, users = pairs["old"], []

    def configure(name: str) -> str:
        certificate, key = (data(each) if suffix else str(each) for each in pairs[name])
        return kube_rig.kubeconfig(
            tmp_path / "config",
            {"server": rotated.url, "certificate-authority": str(of_server[0])},
            {f"client-certificate{suffix}": certificate, f"client-key{suffix}": key},
        )

    def admit(handler: kube_rig.Handler) -> None:
        subject = dict(handler.connection.getpeercert()["subject"][0])
        users.append(subject["commonName"])
        if len(users) == 1:
            configure("new")
        (answer() if subject["commonName"] == "new" else refuse(401))(handler)

    with KubeServer(tls_context(*of_server, *(each for each, _ in pairs.values()))) as rotated:
        rotated.script = [admit] * 9
        client = api.KubeApi.connect(kubeconfig=configure("old"))
        assert client.get("/x") == {}
        client.close()

    assert users == ["old", "new"]


def test_renewed_authority_is_used_after_a_failed_handshake(tmp_path: pathlib.Path) -> None:
    old, new = (make_certificate(tmp_path, name) for name in ("old", "new"))
    context = tls_context(*old)

    def configure(authority: pathlib.Path) -> str:
        cluster = {"server": server.url, "certificate-authority-data": data(authority)}
        return kube_rig.kubeconfig(tmp_path / "config", cluster, {"token": "any"})

    def restart(handler: kube_rig.Handler) -> None:
        answer()(handler)
        handler.close_connection = True
        context.load_cert_chain(*new)

    with KubeServer(context) as server:
        server.script = [restart, answer({"a": 1})]
        client = api.KubeApi.connect(kubeconfig=configure(old[0]))
        client.get("/x")
        assert "certificate verify failed" in failure(client.post, "/x", {}).message
        configure(new[0])
        assert client.get("/x") == {"a": 1}
        client.close()


def test_server_that_moved_is_read_from_the_kubeconfig(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config"

    def configure(url: str) -> str:
        return kube_rig.kubeconfig(path, {"server": url}, {"token": "any"})

    with KubeServer() as before:
        client = api.KubeApi.connect(kubeconfig=configure(before.url))
    with KubeServer() as after:
        after.script = [answer({"a": 1})]
        assert "refused" in failure(client.post, "/x", {}).message
        configure(after.url)
        assert client.post("/x", {}) == {"a": 1}
        client.close()

    assert after.credentials() == [("/x", "Bearer any")]


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"])
def test_credentials_with_the_largest_expiry_date_do_not_crash(
    scripted_server: KubeServer, tmp_path: pathlib.Path, when: str
) -> None:
    # The first is what a program in Go writes for no time at all.
    user = by_plugin(token="fresh", expirationTimestamp=when)  # noqa: S106
    path = kube_rig.kubeconfig(tmp_path / "config", {"server": scripted_server.url}, user)
    client = api.KubeApi.connect(kubeconfig=path)
    try:
        client.post("/version", {})
    except errors.ClusterError as error:
        assert "the credentials cannot be read" in error.message  # noqa: PT017 - either will do


def test_rewritten_kubeconfig_is_read_again_after_a_401(
    scripted_server: KubeServer, tmp_path: pathlib.Path
) -> None:
    path, cluster = tmp_path / "config", {"server": scripted_server.url}
    client = api.KubeApi.connect(kubeconfig=kube_rig.kubeconfig(path, cluster, {"token": "old"}))

    def rotate(handler: kube_rig.Handler) -> None:
        kube_rig.kubeconfig(path, cluster, {"token": "new\n"})
        refuse(401)(handler)

    scripted_server.script = [rotate, answer({"a": 1}), refuse(401), refuse(401)]
    assert client.get("/x") == {"a": 1}
    assert scripted_server.credentials() == [("/x", "Bearer old"), ("/x", "Bearer new")]
    assert failure(client.get, "/x").reason is reasons.Reason.API_UNAVAILABLE

    path.unlink()
    scripted_server.script = [refuse(401)]
    assert failure(client.get, "/x").reason is reasons.Reason.API_UNAVAILABLE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no such file"),
        ("", "file is empty"),
        ("{", "while parsing"),
        ("[]", "not a kubeconfig"),
        ("a host", "not a kubeconfig"),
        ("contexts: 7\ncurrent-context: a\n", "not a kubeconfig"),
        ("contexts: []\ncurrent-context: a\n", "Expected object with name a in"),
    ],
)
def test_a_missing_or_malformed_kubeconfig_is_a_usage_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str | None, why: str
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(errors.UsageError, match=str(path)) as malformed:
        api.KubeApi.connect(kubeconfig=str(path))
    assert why in malformed.value.message
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(errors.UsageError, match="not in a pod") as nowhere:
        api.KubeApi.connect(kubeconfig=None)
    with pytest.raises(errors.UsageError, match="no such file") as too_long:
        api.KubeApi.connect(kubeconfig="a" * 300)
    with pytest.raises(errors.UsageError, match=f"{tmp_path}: Is a directory$"):
        api.KubeApi.connect(kubeconfig=str(tmp_path))
    for error in (malformed.value, nowhere.value, too_long.value):
        assert error.own_remedy == "Name a kubeconfig with --kubeconfig or KUBECONFIG."
        assert error.message == " ".join(error.message.split())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (["no-such-program"], "exec: [Errno 2] No such file or directory: 'no-such-program'"),
        (["/bin/sh", "-c", "echo no session >&2; exit 3"], "exec: process returned 3. no session"),
        (["/bin/echo", "{}"], "exec: malformed response. missing key 'apiVersion'"),
    ],
)
def test_a_program_for_credentials_that_fails_leads_to_one_message(
    tmp_path: pathlib.Path, program: list[str], why: str
) -> None:
    command, *args = program
    version = "client.authentication.k8s.io/v1"
    user = {"exec": {"command": command, "args": args, "apiVersion": version}}
    path = kube_rig.kubeconfig(tmp_path / "config", {"server": "http://127.0.0.1:9"}, user)

    rollout_answer = commandline.run(["rollout", "x", "-l", "a", "--kubeconfig", path], {})

    message = f"no credentials for a Kubernetes API: kubeconfig {path}: {why}\n"
    assert rollout_answer.status == 2
    assert rollout_answer.err.startswith(f"mig-manager: {message}")
    assert [line.split(":")[0].strip() for line in rollout_answer.err.splitlines()] == [
        "mig-manager",
        "remedy",
    ]
    assert logging.getLogger().filters == []


def test_a_slow_program_for_credentials_is_logged(tmp_path: pathlib.Path) -> None:
    user = by_plugin(token="late")  # noqa: S106
    program = user["exec"]
    program["args"] = ["-c", 'sleep 0.5; echo "$0"', *program["args"]]
    program["command"] = "/bin/sh"
    path = kube_rig.kubeconfig(tmp_path / "config", {"server": "http://127.0.0.1:9"}, user)
    configuration = api.Configuration()

    with structlog.testing.capture_logs() as logs:
        credentials.Loader(configuration, path, slow_s=0.1).load()

    assert [each["event"] for each in logs] == ["credentials_awaited"]
    assert configuration.api_key["BearerToken"] == "Bearer late"


@pytest.mark.parametrize(
    ("host", "no_proxy", "is_bypassed"),
    [
        pytest.param("cluster.invalid:8080", "", False, id="no exception"),
        pytest.param("cluster.invalid:8080", "a.invalid, cluster.invalid", True, id="name"),
        pytest.param("[100::1]:8080", "[100::2]", False, id="another address"),
        pytest.param("[100::1]:8080", "100::1", True, id="address"),
        pytest.param("[100::1]:8080", "[100::1]", True, id="address in brackets"),
        pytest.param("127.0.0.1:9", "", True, id="loopback address"),
        pytest.param("[::1]:9", "", True, id="loopback address of IPv6"),
        pytest.param("localhost:9", "", True, id="localhost"),
    ],
)
def test_a_proxy_of_the_environment_is_used_for_the_hosts_as_by_kubectl(
    scripted_server: KubeServer,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    no_proxy: str,
    *,
    is_bypassed: bool,
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", scripted_server.url)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    path = kube_rig.kubeconfig(tmp_path / "config", {"server": f"http://{host}"}, {})
    scripted_server.script = [answer({"major": "1"})]

    with contextlib.closing(api.KubeApi.connect(kubeconfig=path)) as client:
        if is_bypassed:
            failure(client.post, "/version", {})
        else:
            assert client.post("/version", {}) == {"major": "1"}

    paths = [] if is_bypassed else [f"http://{host}/version"]
    assert [request[1] for request in scripted_server.requests] == paths


def test_a_kubeconfigs_proxy_is_used_for_every_host(
    scripted_server: KubeServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    cluster = {"server": "http://127.0.0.1:9", "proxy-url": scripted_server.url}
    path = kube_rig.kubeconfig(tmp_path / "config", cluster, {})
    scripted_server.script = [answer({"major": "1"})]

    with contextlib.closing(api.KubeApi.connect(kubeconfig=path)) as client:
        assert client.get("/version") == {"major": "1"}
