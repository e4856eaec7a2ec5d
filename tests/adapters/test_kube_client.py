"""Each way to a cluster with a part of the official client, in a process of its own."""

import base64
import json
import pathlib
import shutil
import ssl
import subprocess
import sys
import time
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from tests.adapters import kube_rig
from tests.adapters.kube_rig import Server

_HEAVY = frozenset(
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
_IN_A_POD = """
import sys
from kubernetes_paths import TOKEN, AUTHORITY
from mig_manager.adapters.kubernetes import api
service_account = sys.modules["kubernetes.config.incluster_config"]
service_account.SERVICE_TOKEN_FILENAME, service_account.SERVICE_CERT_FILENAME = TOKEN, AUTHORITY
client = api.KubeApi.connect(kubeconfig=None)
"""
_BY_FILE = """
from mig_manager.adapters.kubernetes import api
client = api.KubeApi.connect(kubeconfig=sys.argv[1])
"""
_ASK = """
print(client.get('/version')['major'])
print(*(name for name in sys.modules if name in {heavy!r}))
"""


server = kube_rig.server


def sent(server: Server) -> list[tuple[str, str | None]]:
    """Return the path and the credentials of each request."""
    return [(path, headers.get("Authorization")) for _, path, headers, _ in server.seen]


def loaded_by(script: str, *argv: str, **environ: str) -> set[str]:
    """Ask the server in a new process; return what that has loaded of what is heavy."""
    code = "import sys\n" + script + _ASK.format(heavy=set(_HEAVY))
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", code, *argv],
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    major, *loaded = done.stdout.split()
    assert major == "1"
    return set(loaded)


def certificates(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Make a certificate for 127.0.0.1 that vouches for itself, and its key."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(  # noqa: S603 - nothing of it comes from outside
        [
            shutil.which("openssl") or "openssl",
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


def test_a_token_loads_almost_none_of_the_client_library(
    server: Server, tmp_path: pathlib.Path
) -> None:
    path = kube_rig.kubeconfig(tmp_path, {"server": server.url}, {"token": "a"})
    assert loaded_by(_BY_FILE, path) == set()
    assert sent(server) == [("/version", "Bearer a")]


def test_a_credential_plugin_is_run(server: Server, tmp_path: pathlib.Path) -> None:
    version = "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "fresh"}}
    plugin = {"command": "/bin/echo", "args": [json.dumps(credential)], "apiVersion": version}
    path = kube_rig.kubeconfig(tmp_path, {"server": server.url}, {"exec": plugin})
    assert loaded_by(_BY_FILE, path) == set()
    assert sent(server) == [("/version", "Bearer fresh")]


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"])
def test_credentials_with_the_largest_expiry_date_do_not_crash(
    server: Server, tmp_path: pathlib.Path, when: str
) -> None:
    # The first is what a program in Go writes for no time at all.
    version = "client.authentication.k8s.io/v1"
    status = {"token": "fresh", "expirationTimestamp": when}
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    plugin = {"command": "/bin/echo", "args": [json.dumps(credential)], "apiVersion": version}
    path = kube_rig.kubeconfig(tmp_path, {"server": server.url}, {"exec": plugin})
    client = api.KubeApi.connect(kubeconfig=path)
    try:
        client.post("/version", {})
    except errors.ClusterError as error:
        assert "the credentials cannot be read" in error.message  # noqa: PT017 - either will do


def identity(expires: float) -> str:
    parts = ({"alg": "none"}, {"exp": int(expires)})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in parts]
    return ".".join([*(text.rstrip("=") for text in texts), "signature"])


def openid(server: Server, token: str) -> dict[str, Any]:
    config = {
        "client-id": "me",
        "client-secret": "secret",
        "id-token": token,
        "refresh-token": "again",
        "idp-issuer-url": server.url,
    }
    return {"auth-provider": {"name": "oidc", "config": config}}


def test_an_unexpired_identity_token_does_not_load_oauth(
    server: Server, tmp_path: pathlib.Path
) -> None:
    token = identity(time.time() + 9999)
    path = kube_rig.kubeconfig(tmp_path, {"server": server.url}, openid(server, token))
    assert loaded_by(_BY_FILE, path) == set()
    assert sent(server) == [("/version", f"Bearer {token}")]


def test_an_expired_identity_token_loads_oauth_and_is_renewed(
    server: Server, tmp_path: pathlib.Path
) -> None:
    renewed = identity(time.time() + 9999)
    server.pages["/.well-known/openid-configuration"] = {"token_endpoint": server.url + "/token"}
    server.pages["/token"] = {
        "access_token": "x",
        "token_type": "bearer",
        "id_token": renewed,
        "refresh_token": "once more",
    }
    path = kube_rig.kubeconfig(tmp_path, {"server": server.url}, openid(server, identity(1)))
    loaded = loaded_by(_BY_FILE, path, OAUTHLIB_INSECURE_TRANSPORT="1")
    assert {"requests", "kubernetes.client.api_client"} <= loaded
    assert sent(server)[-1] == ("/version", f"Bearer {renewed}")


@needs_openssl
def test_in_a_pod_the_service_account_trusts_the_server_of_its_certificate_authority(
    tmp_path: pathlib.Path,
) -> None:
    certificate, key = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    token = tmp_path / "token"
    token.write_text("mounted")
    paths = f"TOKEN, AUTHORITY = {str(token)!r}, {str(certificate)!r}"
    (tmp_path / "kubernetes_paths.py").write_text(paths)
    with Server(context) as server:
        loaded = loaded_by(
            _IN_A_POD,
            PYTHONPATH=str(tmp_path),
            KUBERNETES_SERVICE_HOST="127.0.0.1",
            KUBERNETES_SERVICE_PORT=str(server.server_port),
        )
    assert loaded == set()
    assert sent(server) == [("/version", "bearer mounted")]


@needs_openssl
def test_a_client_certificate_in_the_kubeconfig_is_sent_on_request(
    tmp_path: pathlib.Path,
) -> None:
    certificate, key = certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED

    def data(path: pathlib.Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    with Server(context) as server:
        path = kube_rig.kubeconfig(
            tmp_path,
            {"server": server.url, "certificate-authority-data": data(certificate)},
            {"client-certificate-data": data(certificate), "client-key-data": data(key)},
        )
        assert loaded_by(_BY_FILE, path) == set()
    assert sent(server) == [("/version", None)]


def test_the_rest_of_the_client_can_be_imported() -> None:
    script = (
        "import mig_manager.adapters.kubernetes.api, kubernetes, sys\n"
        "assert 'kubernetes.dynamic' not in sys.modules\n"
        "assert kubernetes.dynamic.DynamicClient and kubernetes.config.load_config\n"
        "assert kubernetes.client.V1Node(metadata={'name': 'n'}).metadata.name == 'n'\n"
        "assert kubernetes.utils.parse_quantity('1k') == 1000\n"
        "import importlib.metadata\n"
        "assert importlib.metadata.version('urllib3')\n"
    )
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
