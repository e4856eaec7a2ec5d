"""A cluster with nodes as agents leave them, and the plugin as kubectl runs it."""

import dataclasses
import datetime as dt
import json
import os
import pathlib
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mig_manager import reasons
from mig_manager.adapters import kubectl
from mig_manager.cli.toolkit import console
from mig_manager.core import model
from mig_manager.core.records import run_status
from mig_manager.kubectl import main as plugin
from testkit import apiserver
from tests.rigs import api_objects, layout_table, programs
from tests.rigs.node import gpu_values
from tests.rigs.shell import commandline

BIN = pathlib.Path(sys.executable).parent  # where the console scripts are
CONFIG = (
    layout_table.document(("all-disabled", "all-1g.5gb", "all-balanced"))
    + """\
  all-1g.10gb:
    - {device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}
"""
)


def ago(**span: float) -> str:
    """Return a time in the past as the API writes it."""
    when = dt.datetime.now(tz=dt.UTC) - dt.timedelta(**span)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def gpus_with(spec: str, layout: str | None = None) -> tuple[model.Gpu, ...]:
    """Return GPUs of a simulated node, with a layout for A100s if one is named."""
    (devices,) = layout_table.gpus_with(layout or "all-disabled", 1)
    return gpu_values.gpus_of(spec, layout_table.counts(devices))


def node(  # noqa: PLR0913 - each is named where it is called
    name: str,
    *,
    gpus: Sequence[model.Gpu] | None = None,
    requested: str | None = None,
    reported: str | None = None,
    state: run_status.State | None = run_status.State.SUCCESS,
    reason: reasons.Reason | None = reasons.Reason.APPLIED,
    message: str = "it is applied",
    minutes: float = 5,
    is_ready: bool = True,
    config_hash: str | None = None,
    annotation_hash: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> api_objects.Object:
    """Return a Node as its agent leaves it.

    ``gpus`` are those that it publishes, ``reported`` is the layout of its status if not the
    requested one, ``state`` is None without a status, and the run began ``minutes`` ago.
    """
    labels = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/mig.strategy": "mixed",
        **(labels or {}),
    }
    annotations: dict[str, str] = {}
    if requested is not None:
        labels["nvidia.com/mig.config"] = requested
    if requested is not None and state is not None:
        is_done = state in (run_status.State.SUCCESS, run_status.State.FAILED)
        text = api_objects.a_status(
            reported or requested,
            state,
            configHash=config_hash,
            annotationHash=annotation_hash,
            reason=reason and reason.value,
            message=message,
            startedAt=ago(minutes=minutes),
            finishedAt=ago(minutes=minutes) if is_done else None,
        )
        labels["nvidia.com/mig.config.state"] = state.value
        annotations = api_objects.annotations_of_agent(status_text=text)
        if state is run_status.State.SUCCESS:
            labels["mig-manager.io/applied"] = reported or requested
    ready = "True" if is_ready else "Unknown"
    return api_objects.a_node(name, labels, gpus=gpus, annotations=annotations, ready=ready)


def pod(name: str, node_name: str, **asks: int) -> api_objects.Object:
    """Return a running pod that requests devices, such as ``mig_1g_5gb=2`` or ``gpu=1``."""
    limits = {
        f"nvidia.com/{what.replace('_', '-', 1).replace('_', '.')}": count
        for what, count in asks.items()
    }
    return api_objects.a_pod(name, node=node_name, namespace="ml", limits=limits)


def run(command: Sequence[str], environ: Mapping[str, str]) -> commandline.Answer:
    """Run a program of the machine in an environment of its own."""
    done = programs.run(*command, cwd=None, stdin="", **environ)
    return commandline.Answer(status=done.returncode, out=done.stdout, err=done.stderr)


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each row of the first table, its header included, by the first cell."""
    table = text.partition("\n\n")[0].splitlines()
    cells = ([cell.strip() for cell in line.split("  ") if cell] for line in table)
    return {row[0]: row for row in cells}


class _Requests(kubectl.Kubectl):
    """Sends a request as kubectl would, without its process, to the server at a URL."""

    def __init__(self, real: kubectl.Kubectl, url: str) -> None:
        self._real = real
        self._url = url

    def run(self, arguments: Sequence[str], what: str) -> bytes:
        is_default_cluster = len(self._real.options) <= 1  # one option: the timeout
        match arguments:
            case ["get", "--raw", path] if is_default_cluster:
                request = urllib.request.Request(self._url + path)  # noqa: S310 - of the test
            case ["patch", "node", name, "--type=merge", patch, *_] if is_default_cluster:
                request = urllib.request.Request(  # noqa: S310
                    f"{self._url}/api/v1/nodes/{name}?fieldManager=kubectl-mig",
                    data=patch.removeprefix("--patch=").encode(),
                    headers={"Content-Type": "application/merge-patch+json"},
                    method="PATCH",
                )
            case _:
                return self._real.run(arguments, what)
        try:
            with urllib.request.urlopen(request) as response:  # noqa: S310
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            with error:
                message = "Error from server ({reason}): {message}".format_map(json.load(error))
            raise kubectl.refusal(what, message) from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubectlUser:
    """A user with a kubeconfig, at a shell."""

    server: apiserver.ApiServer
    home: pathlib.Path
    path: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "KUBECONFIG": str(self.home / "kubeconfig"),
            "PATH": self.path,
            "PYTHONWARNINGS": "error",
        }

    def kubectl(self, *words: str) -> commandline.Answer:
        return run([programs.path_or_skip("kubectl"), *words], self.environment)

    def run_plugin(
        self,
        *words: str,
        stdin: str = "",
        command: commandline.Main = plugin.run,
        quick: bool = True,
        **environ: str,
    ) -> commandline.Answer:
        """Run the plugin in this process; its requests reach the server without kubectl."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(self.home))
            patch.setenv("KUBECONFIG", str(self.home / "kubeconfig"))
            return commandline.run(
                words,
                environ,
                command=command,
                stdin=stdin,
                program="kubectl-mig",
                replace_adapter=self._replace if quick else console.keep,
            )

    def _replace(self, adapter: Any) -> Any:
        is_kubectl = isinstance(adapter, kubectl.Kubectl)
        return _Requests(adapter, self.server.url) if is_kubectl else adapter

    def run_plugin_with_kubectl(self, *words: str) -> commandline.Answer:
        """Run the plugin in this process; kubectl sends its requests."""
        return self.run_plugin(*words, quick=False)

    def complete(self, *words: str) -> commandline.Answer:
        return self.run_plugin(*words, command=plugin.answer_completion)

    def run_kubectl_mig(self, *words: str) -> commandline.Answer:
        """Have kubectl run the plugin."""
        return self.kubectl("mig", *words)


def kubectl_user(
    server: apiserver.ApiServer, home: pathlib.Path, *, plugins: pathlib.Path = BIN
) -> KubectlUser:
    """Return a user with a kubeconfig for this server."""
    server.kubeconfig(home / "kubeconfig")
    path = os.pathsep.join([str(plugins), os.environ["PATH"]])
    return KubectlUser(server=server, home=home, path=path)
