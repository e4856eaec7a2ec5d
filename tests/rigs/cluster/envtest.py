"""A real kube-apiserver with its etcd, and a kube-scheduler, for as long as the tests run.

``KUBEBUILDER_ASSETS`` names the folder that has both programs, as envtest of Kubernetes'
controller-runtime would have it; without it ``tests/cluster/programs/build`` builds them, once.
"""

import base64
import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence

import pytest
import urllib3

from tests.rigs import programs, waiting

BUILD = pathlib.Path(__file__).parents[2] / "cluster" / "programs" / "build"
ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
PROGRAMS = ("etcd", "kube-apiserver")
STOP_TIMEOUT_S = 20.0
_ALPHA = (34, 35)
END_WITH_PARENT = 'exec 3<&0; "$@" & cat <&3 >/dev/null & wait -n; kill -9 $(jobs -p); wait'
"""Runs a program for as long as its standard input is open, which closes however we end. When it
returns, the program is gone and its port is free."""
ADMIN_TOKEN = secrets.token_hex(16)
SCHEDULER = "kube-scheduler"
_SCHEDULER_TOKEN = secrets.token_hex(16)
AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
# With its body, which says whether it is a dry run.
- level: Request
  resources: [{group: "", resources: [pods/eviction]}]
- level: Metadata
"""


def assets() -> pathlib.Path:
    """Return the folder with the programs; skip or, under CI, fail where it cannot be had."""
    folder = os.environ.get(ASSETS_VARIABLE)
    if not folder:
        folder = str(_built())
    missing = [name for name in PROGRAMS if not (pathlib.Path(folder) / name).is_file()]
    if missing:
        pytest.fail(f"{folder} has no {' and no '.join(missing)}")
    return pathlib.Path(folder)


def _built(*names: str) -> pathlib.Path:
    if shutil.which("go") is None:
        pytest.skip(
            f"{ASSETS_VARIABLE} names no folder with them, and no Go is here to build them"
        )
    done = subprocess.run(  # noqa: S603 - our own script
        [str(BUILD), *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return pathlib.Path(done.stdout.strip())


class Programs:
    """Programs of a control plane, and the folder with what they read and write."""

    def __init__(self, built: pathlib.Path, folder: pathlib.Path) -> None:
        self._programs = built
        self.folder = folder

    @property
    def certificate(self) -> pathlib.Path:
        """What the API server signed for itself; it is its own authority."""
        return self.folder / "certs" / "apiserver.crt"

    @property
    def audit_log(self) -> pathlib.Path:
        return self.folder / "audit.log"

    def _prepare(self, *tokens: str) -> None:
        """Write what kube-apiserver reads; each token with its user, UID and groups."""
        (self.folder / "service-accounts.key").write_text(new_key())
        (self.folder / "tokens.csv").write_text("".join(f"{each}\n" for each in tokens))
        (self.folder / "audit.yaml").write_text(AUDIT_POLICY)

    def _api_arguments(
        self, etcd_url: str, *, address: str, port: int, services: str
    ) -> list[str]:
        key = self.folder / "service-accounts.key"
        return [
            f"--etcd-servers={etcd_url}",
            f"--bind-address={address}",
            f"--secure-port={port}",
            f"--cert-dir={self.certificate.parent}",
            f"--service-cluster-ip-range={services}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.audit_log}",
        ]

    def _write_kubeconfig(self, path: pathlib.Path, *, url: str, token: str) -> pathlib.Path:
        authority = base64.b64encode(self.certificate.read_bytes()).decode()
        cluster = {"server": url, "certificate-authority-data": authority}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": "real", "user": {"token": token}}],
            "contexts": [{"name": "real", "context": {"cluster": "real", "user": "real"}}],
            "current-context": "real",
        }
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path

    def _spawn(
        self, name: str, *arguments: str, folder: pathlib.Path | None = None
    ) -> subprocess.Popen[bytes]:
        program = str((folder or self._programs) / name)
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - the program is what these tests are about
                ["/bin/bash", "-c", END_WITH_PARENT, name, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


class EnvtestServer(Programs):
    """One kube-apiserver with an etcd of its own, in a folder of its own."""

    def __init__(self, built: pathlib.Path, folder: pathlib.Path) -> None:
        super().__init__(built, folder)
        self._etcd_url, self._port = "", 0
        self._api: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process of kube-apiserver, while it runs."""
        assert self._api is not None
        return self._api.pid

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._prepare(
            f"{ADMIN_TOKEN},admin,admin,system:masters",
            f"{_SCHEDULER_TOKEN},system:kube-scheduler,system:kube-scheduler",
        )
        client, member, self._port = free_ports(3)
        self._etcd_url = f"http://127.0.0.1:{client}"
        member_url = f"http://127.0.0.1:{member}"
        etcd = self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={member_url}",
            f"--initial-advertise-peer-urls={member_url}",
            f"--initial-cluster=default={member_url}",
            # The data need not survive a power cut.
            "--unsafe-no-fsync",
        )
        try:
            self.start()
            yield
        finally:
            self.kill()
            end(etcd)

    @contextlib.contextmanager
    def scheduling(self, config: pathlib.Path | None = None) -> Iterator[None]:
        """Run kube-scheduler, which is built where the assets of envtest lack it.

        Args:
            config: A KubeSchedulerConfiguration that names a kubeconfig; None: the defaults.
        """
        settings = [f"--config={config}"]
        if config is None:
            kubeconfig = self.kubeconfig(self.folder / SCHEDULER, token=_SCHEDULER_TOKEN)
            settings = [f"--kubeconfig={kubeconfig}", "--leader-elect=false"]
        has_it = (self._programs / SCHEDULER).is_file()
        folder = self._programs if has_it else _built(SCHEDULER)
        gates = self._gates(folder / SCHEDULER)
        scheduler = self._spawn(SCHEDULER, *settings, *gates, "--secure-port=0", folder=folder)
        try:
            yield
        finally:
            end(scheduler)

    def start(self) -> None:
        """Start kube-apiserver on the port it had before; return when it is ready."""
        arguments = self._api_arguments(
            self._etcd_url, address="127.0.0.1", port=self._port, services="10.0.0.0/24"
        )
        # One client at a time needs no fairness; its start takes seconds.
        fairness = "--enable-priority-and-fairness=false"
        gates = self._gates(self._programs / "kube-apiserver")
        self._api = self._spawn("kube-apiserver", *arguments, fairness, *gates)
        waiting.until(self._is_ready, "kube-apiserver", within_s=120)

    def kill(self) -> None:
        """Kill kube-apiserver, as a crash would."""
        if self._api is not None:
            end(self._api)
        self._api = None

    def kubeconfig(self, path: pathlib.Path, *, token: str) -> pathlib.Path:
        return self._write_kubeconfig(path, url=self.url, token=token)

    @staticmethod
    def _gates(program: pathlib.Path) -> Sequence[str]:
        """Return the option by which a program knows extended resources from claims (KEP-5004).

        They are alpha in 1.34 and 1.35 and on by default since, and matter to no pod of a
        resource that no DeviceClass names.
        """
        shown = programs.output(str(program), "--version")
        _, minor = (int(number) for number in re.findall(r"\d+", shown)[:2])
        return ["--feature-gates=DRAExtendedResource=true"] if minor in _ALPHA else []

    def _is_ready(self) -> bool:
        assert self._api is not None
        if self._api.poll() is not None:
            pytest.fail((self.folder / "kube-apiserver.log").read_text()[-2000:])
        if not self.certificate.exists():
            return False
        with urllib3.PoolManager(ca_certs=str(self.certificate), retries=False) as http:
            try:
                headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
                return http.request("GET", f"{self.url}/readyz", headers=headers).status == 200
            except urllib3.exceptions.HTTPError:
                return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe to a program, which ends it, and wait for its end."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(STOP_TIMEOUT_S)


def free_ports(count: int) -> list[int]:
    """Return ports that the kernel gives to no client: one could take a restarting server's.

    Other test processes have others: a server listens seconds after its port was found free.
    """
    lowest = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    span = lowest // 2 // 16
    first = lowest // 2 + worker % 16 * span
    with contextlib.ExitStack() as exits:
        ports: list[int] = []
        while len(ports) < count:
            each = exits.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", first + secrets.randbelow(span)))
                ports.append(each.getsockname()[1])
        return ports


def new_key() -> str:
    """Return a private key on the curve P-256 as RFC 5915 writes it, the public half left out."""
    number = b"\0" + secrets.token_bytes(31)
    curve = bytes.fromhex("a00a06082a8648ce3d030107")
    der = bytes.fromhex("30310201010420") + number + curve
    text = base64.encodebytes(der).decode()
    return f"-----BEGIN EC PRIVATE KEY-----\n{text}-----END EC PRIVATE KEY-----\n"
