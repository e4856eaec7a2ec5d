"""etcd, kube-apiserver, controller manager and scheduler, on the network of the control plane."""

import contextlib
import json
import pathlib
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import urllib3

from tests.realnode import namespaces
from tests.rigs import waiting
from tests.rigs.cluster import envtest

SERVICE_IP = "10.96.0.1"
PORT = 6443
_CLIENTS = ("kube-controller-manager", "kube-scheduler")


class ControlPlane(envtest.Programs):
    """A cluster's programs, whose logs and audit log lie in one folder."""

    def __init__(self, programs: pathlib.Path, folder: pathlib.Path, nodes: Sequence[str]) -> None:
        super().__init__(programs, folder)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._http: urllib3.PoolManager | None = None
        users = ["admin", "system:kube-controller-manager", "system:kube-scheduler"]
        self._groups = dict.fromkeys(users, "") | {"admin": "system:masters"}
        self._groups |= {f"system:node:{name}": "system:nodes" for name in nodes}
        self._tokens = {user: secrets.token_hex(16) for user in self._groups}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        groups = self._groups.items()
        self._prepare(*(f'{self._tokens[user]},{user},{user},"{group}"' for user, group in groups))
        try:
            self._start("etcd", *self._etcd_arguments())
            self.start_api()
            for name in _CLIENTS:
                self._start(name, *self._arguments_of(name))
            yield
        finally:
            for process in self._processes.values():
                envtest.end(process)
            if self._http is not None:
                self._http.clear()

    def start_api(self) -> None:
        """Start kube-apiserver; return when it is ready."""
        arguments = self._api_arguments(
            "http://127.0.0.1:2379",
            address=namespaces.CONTROL_IP,
            port=PORT,
            services="10.96.0.0/24",
        )
        self._start(
            "kube-apiserver",
            *arguments,
            f"--advertise-address={namespaces.CONTROL_IP}",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        )
        waiting.until(self._is_ready, "kube-apiserver", within_s=120)

    def kill_api(self) -> None:
        """End kube-apiserver as a crash would."""
        envtest.end(self._processes.pop("kube-apiserver"))

    def restart_clients(self) -> None:
        """Restart the controller manager and the scheduler."""
        for name in _CLIENTS:
            envtest.end(self._processes.pop(name))
            self._start(name, *self._arguments_of(name))

    def read(self, path: str) -> dict[str, Any]:
        """Return what the API server has at a path.

        Raises:
            RuntimeError: It does not answer, or refuses.
        """
        answer = self._get(path, timeout=30)
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.data.decode()[:500]}")
        body: dict[str, Any] = answer.json() if answer.data[:1] == b"{" else {}
        return body

    def watch(self, path: str) -> Iterator[dict[str, Any]]:
        """Return each event of a watch until the API server ends it.

        Raises:
            RuntimeError: It does not answer, or ends the watch in the middle.
        """
        answer = self._get(f"{path}?watch=true", preload_content=False)
        try:
            for line in answer:
                yield json.loads(line)
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise RuntimeError(f"{path}: {error}") from error

    def _get(self, path: str, **options: Any) -> urllib3.BaseHTTPResponse:
        if self._http is None:
            # Kept: a connection costs more than a request.
            self._http = urllib3.PoolManager(ca_certs=str(self.certificate), retries=False)
        headers = {"Authorization": f"Bearer {self._tokens['admin']}"}
        url = f"https://{namespaces.CONTROL_IP}:{PORT}{path}"
        try:
            return self._http.request("GET", url, headers=headers, **options)
        except urllib3.exceptions.HTTPError as error:
            raise RuntimeError(f"{path}: {error}") from error

    def kubeconfig(self, user: str, path: pathlib.Path | None = None) -> pathlib.Path:
        path = path or self.folder / f"{user.replace(':', '-')}.kubeconfig"
        url = f"https://{namespaces.CONTROL_IP}:{PORT}"
        return self._write_kubeconfig(path, url=url, token=self._tokens[user])

    def _start(self, name: str, *arguments: str) -> None:
        self._processes[name] = self._spawn(name, *arguments)

    def _etcd_arguments(self) -> list[str]:
        return [f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync"]

    def _arguments_of(self, name: str) -> list[str]:
        config = self.kubeconfig(f"system:{name}")
        shared = [f"--kubeconfig={config}", "--leader-elect=false", "--bind-address=127.0.0.1"]
        if name == "kube-scheduler":
            return shared
        return [
            *shared,
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.folder / 'service-accounts.key'}",
            f"--root-ca-file={self.certificate}",
            "--controllers=*,-bootstrapsigner,-tokencleaner",
        ]

    def _is_ready(self) -> bool:
        if self._processes["kube-apiserver"].poll() is not None:
            raise RuntimeError((self.folder / "kube-apiserver.log").read_text()[-2000:])
        if not self.certificate.exists():
            return False
        try:
            self.read("/readyz")
        except RuntimeError:
            return False
        return True
