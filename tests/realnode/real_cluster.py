"""A cluster of real programs on this machine, and what its stories ask of it."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import IO

from mig_manager.sandbox.driver import states
from tests.realnode import (
    contract_keys,
    control,
    driver,
    images,
    manifests,
    namespaces,
    node,
    progress,
)
from tests.rigs import waiting
from tests.rigs.api_objects import Object
from tests.rigs.cluster import audit, deploy_files, envtest

PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "nvidia-device-plugin",
    "gpu-feature-discovery",
    "config-manager",
    "nvidia-container-runtime",
    "pause",
)
"""What every cluster runs."""
NODE = "node-a"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
CACHE /= namespaces.IMAGE_CACHE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """What a cluster consists of."""

    nodes: tuple[str, ...] = (NODE,)
    gpus: str = "2xA100-SXM4-40GB"
    overlay: str | None = "unprivileged"
    """Of ``deploy/overlays``; without one neither agent nor device plugin is installed."""
    patches: tuple[Object, ...] = ()  # what an owner changes in the overlay
    latency: states.Latency | None = None  # how long the driver's calls take; None: no time


@dataclasses.dataclass(frozen=True, slots=True)
class RealMachine:
    """One node with its driver."""

    node: node.RealNode
    driver: driver.GpuDriver


class RealCluster:
    """Control plane, nodes and images; ``kubectl`` speaks to it as its administrator."""

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path, shape: ClusterShape) -> None:
        self.programs = built(*PROGRAMS)
        """The folder with the programs."""
        self.images = images.Images(cache)
        self._disk = self.images.disk(self.programs)
        self.folder = folder
        self.shape = shape
        self.plane = control.ControlPlane(self.programs, folder / "control", shape.nodes)
        self.machines: dict[str, RealMachine] = {}
        self._before: dict[str, Object] = {}
        """Every node's status before its last request."""

    @property
    def driver(self) -> driver.GpuDriver:
        """The driver of the first node."""
        return self.machines[NODE].driver

    @property
    def node(self) -> node.RealNode:
        """The first node."""
        return self.machines[NODE].node

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Run the control plane, all nodes and what the shape says runs on them for the body."""
        with contextlib.ExitStack() as running:
            namespaces.own_network()
            progress.note("starting the control plane")
            running.enter_context(self.plane.running())
            group = running.enter_context(namespaces.cgroup(f"mig-manager-nodes-{os.getpid()}"))
            for number, name in enumerate(self.shape.nodes, 1):
                progress.note(f"starting {name}")
                home = self.folder / name
                (home / "driver").mkdir(parents=True)
                gpus = driver.GpuDriver(
                    home / "driver", self.shape.gpus, latency=self.shape.latency
                )
                running.enter_context(gpus.serving())
                each = node.RealNode(name, number, self.programs, home, group)
                running.callback(each.halt)
                each.install(self._disk)
                each.boot(self.plane)
                self.machines[name] = RealMachine(each, gpus)
            for name in self.shape.nodes:
                waiting.until(functools.partial(self.is_ready, name), f"node {name}", within_s=90)
                labels = ("nvidia.com/mig.capable=true", "nvidia.com/gpu.present=true")
                self.kubectl("label", "node", name, *labels)
            if self.shape.overlay is not None:
                self.apply(manifests.plugin())
            yield

    # -- what people do -----------------------------------------------------------------------

    def kubectl(self, *arguments: str, document: Object | str | None = None) -> str:
        """Run kubectl with a document on its standard input.

        Raises:
            RuntimeError: It failed; the message has what it said.
        """
        if isinstance(document, dict):
            document = json.dumps(document)
        done = subprocess.run(
            self._line(*arguments),
            input=document,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def running_kubectl(self, *arguments: str, output: IO[str]) -> Iterator[None]:
        """Run kubectl during the body."""
        with subprocess.Popen(self._line(*arguments), stdout=output) as process:
            try:
                yield
            finally:
                process.terminate()

    def _line(self, *arguments: str) -> list[str]:
        return [_tool("kubectl"), f"--kubeconfig={self.plane.kubeconfig('admin')}", *arguments]

    def get(self, *arguments: str) -> Object:
        """Return what ``kubectl get`` prints as JSON."""
        match arguments:
            # Stories poll these, and kubectl takes a tenth of a second of a processor.
            case ["node", name]:
                return self.plane.read(f"/api/v1/nodes/{name}")
            case ["pods", "-n", namespace, selector] if selector.startswith("--selector="):
                query = selector.removeprefix("--selector=")
                path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={query}"
                return self.plane.read(path)
        item: Object = json.loads(self.kubectl("get", "--output=json", *arguments))
        return item

    def apply(self, *documents: Object) -> None:
        """Apply objects."""
        every = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("apply", "--filename=-", document=every)

    def install_agent(self) -> None:
        """Install the agent as the shape says, if it says so."""
        if self.shape.overlay is not None:
            progress.note("installing the agent")
            self.install(self.shape.overlay, *self.shape.patches)

    def install(self, overlay: str, *patches: Object) -> None:
        """Install an overlay as shipped but for the name of its image.

        Args:
            overlay: One of ``deploy/overlays``.
            patches: Strategic merge patches, as an owner would write them.
        """
        self.kubectl("apply", "--filename=-", document=self._render(overlay, *patches))
        # The operator starts the agent itself.
        if overlay != "gpu-operator":
            self.wait_for_daemons("mig-manager", "mig-manager")

    def wait_for_daemons(self, namespace: str, *names: str) -> None:
        """Wait until each node of some DaemonSets has a ready pod."""
        for name in names:
            # kubectl is content with none, until the controller knows the nodes' labels.
            wants_pods = functools.partial(self._wants_pods, namespace, name)
            waiting.until(wants_pods, f"pods of {name}")
            self.kubectl("rollout", "status", "-n", namespace, f"ds/{name}", "--timeout=120s")

    def _wants_pods(self, namespace: str, name: str) -> bool:
        status = self.get("daemonset", "-n", namespace, name)["status"]
        return bool(status["desiredNumberScheduled"])

    def uninstall(self, overlay: str) -> None:
        """Delete every object of an overlay; return when they are gone."""
        self.kubectl("delete", "--filename=-", document=self._render(overlay))

    def _render(self, overlay: str, *patches: Object) -> str:
        """Return an overlay with our image, as YAML."""
        kustomization = self.folder / "kustomization"
        kustomization.mkdir(exist_ok=True)
        repository, _, tag = images.AGENT.partition(":")
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [
                os.path.relpath(deploy_files.DEPLOY / "overlays" / overlay, kustomization)
            ],
            "images": [{"name": "mig-manager", "newName": repository, "newTag": tag}],
            "patches": [{"patch": json.dumps(patch)} for patch in patches],
        }
        (kustomization / "kustomization.yaml").write_text(json.dumps(document))
        return self.kubectl("kustomize", str(kustomization))

    def reboot(self) -> None:
        """Cut the first node's power and start it again; return when its kubelet runs."""
        self.node.halt()
        self.driver.reboot()
        self.node.boot(self.plane)

    def request(self, layout: str, name: str = NODE) -> None:
        """Ask for a layout as people do."""
        self._before[name] = self.status(name)
        self.kubectl(
            "label", "--overwrite", "node", name, f"{contract_keys.CONFIG_LABEL}={layout}"
        )

    def outcome(self, layout: str, name: str = NODE) -> Object:
        """Wait until the agent has ended the last request; return its status."""

        def has_ended() -> bool:
            status = self.status(name)
            return (
                status.get("config") == layout
                and self._is_new(status, name)
                and "finishedAt" in status
                and "retryAt" not in status
            )

        waiting.until(has_ended, f"an outcome of {layout}", within_s=120)
        return self.status(name)

    def apply_layout(self, layout: str, name: str = NODE) -> None:
        """Ask for a layout, and check that it becomes active."""
        self.request(layout, name)
        assert self.outcome(layout, name)["state"] == "success"

    def _is_new(self, status: Object, name: str) -> bool:
        """Check whether a run began after the last request; two can begin in one second."""
        before = self._before.get(name, {})
        return any(status.get(key) != before.get(key) for key in ("config", "startedAt"))

    def ensure_layout(self, layout: str) -> None:
        """Start a story on a node that has a layout."""
        if self.labels().get(contract_keys.APPLIED_LABEL) != layout:
            self.apply_layout(layout)

    def deploy(
        self, name: str, resource: str, replicas: int = 1, **spec: object
    ) -> dict[str, str]:
        """Run pods that compute on one device each; return their UIDs by name."""
        self.apply(manifests.workload(name, resource, replicas, **spec))
        waiting.until(lambda: len(self.running(name)) == replicas, f"{replicas} pods of {name}")
        return self.running(name)

    def reset(self) -> None:
        """End what the story before has started, and remove its request."""
        kinds = "deployments,pods,poddisruptionbudgets"
        self.kubectl("delete", kinds, "-n", "default", "--all", "--grace-period=1")
        for name, machine in self.machines.items():
            machine.driver.gpus.clear_faults()
            if self.shape.overlay is not None:
                self.withdraw(name)

    def withdraw(self, name: str = NODE) -> None:
        """Remove the request for a layout; return when no run is under way."""
        self.kubectl("label", "node", name, f"{contract_keys.CONFIG_LABEL}-")
        waiting.until(functools.partial(self.is_idle, name), "the end of a run")

    def is_idle(self, name: str) -> bool:
        """Check whether no run is under way; the state of the last one stays on the node."""
        metadata = self.get("node", name)["metadata"]
        is_pending = metadata["labels"].get(contract_keys.STATE_LABEL) in {"pending", "rebooting"}
        return not is_pending and contract_keys.JOURNAL_ANNOTATION not in metadata.get(
            "annotations", {}
        )

    # -- what is so ---------------------------------------------------------------------------

    def status(self, name: str = NODE) -> Object:
        """Return the status that the agent has published; empty before the first."""
        annotations = self.get("node", name)["metadata"].get("annotations", {})
        content: Object = json.loads(annotations.get(contract_keys.STATUS_ANNOTATION, "{}"))
        return content

    def labels(self, name: str = NODE) -> Mapping[str, str]:
        """Return the node's labels."""
        node_labels: Mapping[str, str] = self.get("node", name)["metadata"]["labels"]
        return node_labels

    def taints(self, name: str = NODE) -> list[str]:
        """Return the keys of the node's taints."""
        return [taint["key"] for taint in self.get("node", name)["spec"].get("taints", [])]

    def allocatable(self, name: str = NODE) -> dict[str, int]:
        """Return how many devices of each of NVIDIA's resources pods can be given."""
        return devices(self.get("node", name))

    def is_ready(self, name: str) -> bool:
        """Check whether kubelet has reported its node as ready."""
        try:
            conditions = self.get("node", name)["status"]["conditions"]
        except RuntimeError:
            return False
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def pods(self, namespace: str = "default", **labels: str) -> list[Object]:
        """Return a namespace's pods with these labels."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        items: list[Object] = self.get("pods", "-n", namespace, f"--selector={selector}")["items"]
        return items

    def running(self, name: str) -> dict[str, str]:
        """Return the UIDs of a workload's running pods by name."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self.pods(app=name)
            if is_running(pod)
        }

    def refused_pods(self) -> list[str]:
        """Return the pods that the scheduler placed and kubelet had no device for."""
        return [
            pod["metadata"]["name"]
            for pod in self.pods()
            if pod["status"].get("reason") == "UnexpectedAdmissionError"
        ]

    def listen(self) -> audit.Log:
        """Begin to note what clients ask of the API server."""
        return audit.Log(self.plane.folder / "audit.log")

    def wait_for_phase(self, phase: str) -> None:
        """Wait until the run under way is in a phase."""

        def is_there() -> bool:
            status = self.status()
            return self._is_new(status, NODE) and status.get("phase") == phase

        waiting.until(is_there, f"phase {phase}")

    # -- what remains of it -------------------------------------------------------------------

    def save(self, target: pathlib.Path) -> None:
        """Keep what explains a failure: objects, events, logs, the driver's state."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in self.folder.rglob("*"):
            is_log = path.suffix in {".log", ".json"} and path.is_file()
            if is_log and not {"etcd", "containerd", "volumes"} & set(path.parts):
                name = "-".join(path.relative_to(self.folder).parts)
                shutil.copy(path, target / name[-200:])
        for what in ("nodes", "pods", "events", "daemonsets", "configmaps"):
            with contextlib.suppress(OSError, RuntimeError, subprocess.TimeoutExpired):
                text = self.kubectl("get", what, "--all-namespaces", "--output=yaml")
                (target / f"{what}.yaml").write_text(text)


def is_running(pod: Object) -> bool:
    """Check whether a pod runs and was neither deleted nor evicted.

    Right after a reboot kubelet may not have found its containers yet.
    """
    status = pod["status"]
    is_kept = "deletionTimestamp" not in pod["metadata"]
    return is_kept and status["phase"] == "Running" and "containerStatuses" in status


def devices(obj: Object) -> dict[str, int]:
    """Return how many devices of each of NVIDIA's resources pods can be given on a node."""
    return _counts(obj["status"]["allocatable"])


def capacity(obj: Object) -> dict[str, int]:
    """Return how many devices of each of NVIDIA's resources a node has, unhealthy ones too."""
    return _counts(obj["status"]["capacity"])


def _counts(quantities: Mapping[str, str]) -> dict[str, int]:
    return {
        key.removeprefix("nvidia.com/"): int(value)
        for key, value in quantities.items()
        if key.startswith("nvidia.com/") and value != "0"
    }


def built(*programs: str) -> pathlib.Path:
    """Build programs, once; return their folder."""
    command = [str(envtest.BUILD), *programs]
    output: list[str] = []
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as building:
        assert building.stdout is not None
        assert building.stderr is not None
        for line in building.stderr:
            output.append(line)
            if progress.is_note(line):
                progress.note(line.strip())
        folder = building.stdout.read().strip()
    if building.returncode:
        raise RuntimeError("".join(output))
    return pathlib.Path(folder)


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path, name
    return path
