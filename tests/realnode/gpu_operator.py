"""NVIDIA's GPU operator, built from its source and installed by its own chart.

What needs hardware is off: the operands for driver and toolkit, and the validator. Its files, for
which other operands wait, and the labels of NFD are set by hand.
"""

import functools
import json
import pathlib
import subprocess
from collections.abc import Mapping

import yaml

from tests.realnode import images, operator, real_cluster
from tests.rigs import programs, waiting
from tests.rigs.api_objects import Object
from tests.rigs.cluster import deploy_files, envtest

NAMESPACE = PROGRAM = "gpu-operator"
MANAGER = "nvidia-mig-manager"
PLUGIN = "nvidia-device-plugin-daemonset"
DCGM = "stand-in-for-dcgm"
_SHIPPED = deploy_files.DEPLOY / "overlays/gpu-operator/values.yaml"
_MODULE = "github.com/NVIDIA/gpu-operator"
_VALIDATIONS = "/run/nvidia/validations"
_LABELS = {
    "feature.node.kubernetes.io/kernel-version.full": "6.1.0-40-amd64",
    "feature.node.kubernetes.io/pci-10de.present": "true",
    "feature.node.kubernetes.io/system-os_release.ID": "debian",
    "feature.node.kubernetes.io/system-os_release.VERSION_ID": "12",
    # The validator computes on the GPUs before it writes its files.
    "nvidia.com/gpu.deploy.operator-validator": "false",
}


def prepare() -> None:
    """Build the operator; before a cluster starts, because then there is no network."""
    real_cluster.built(PROGRAM)
    _module()


class Operator:
    """The operator of a cluster, as its owner uses it."""

    def __init__(self, cluster: real_cluster.RealCluster) -> None:
        self._cluster = cluster

    def install(self) -> None:
        """Install it with its own defaults but for what the node cannot have."""
        cluster = self._cluster
        program = real_cluster.built(PROGRAM) / PROGRAM
        cluster.node.import_image(cluster.images.operator(program, _module()))
        spaces = cluster.node.spaces
        spaces.run("mkdir", "-p", _VALIDATIONS)
        # As with a driver container, the operator's default: without one the agent would stop
        # services of the host, which has no systemd here.
        spaces.run("touch", *(f"{_VALIDATIONS}/{each}-ready" for each in ("driver", "toolkit")))
        labels = (f"{key}={value}" for key, value in _LABELS.items())
        cluster.kubectl("label", "--overwrite", "node", real_cluster.NODE, *labels)
        self._helm("install", "--create-namespace", values=_VALUES)

    def run_dcgm(self) -> str:
        """Run what the operator's label for DCGM starts and stops; return its pod's UID.

        The operator deletes a DaemonSet of DCGM's own name, since that operand is off.
        """
        pod = {"containers": [{"name": DCGM, "image": images.PAUSE}]}
        self._cluster.apply(operator.operand(DCGM, "dcgm", pod))
        return self.uid(DCGM)

    def uid(self, name: str) -> str:
        """Wait for the one ready pod of a DaemonSet; return its UID."""
        self._cluster.wait_for_daemons(NAMESPACE, name)
        (pod,) = self._cluster.pods(NAMESPACE, app=name)
        return str(pod["metadata"]["uid"])

    def use_ours(self) -> None:
        """Install our overlay and our values, as the owner does."""
        self._cluster.install("gpu-operator")
        shipped = yaml.safe_load(_SHIPPED.read_text())
        self.upgrade(shipped | {"migManager": shipped["migManager"] | _image(images.AGENT)})
        self.wait_for_operand(MANAGER, images.AGENT)

    def use_theirs(self) -> None:
        """Undo our values and our overlay, as the owner does to return to NVIDIA's image."""
        self._helm("upgrade", "--reset-values", values=_VALUES)
        self._cluster.uninstall("gpu-operator")

    def upgrade(self, values: Object) -> None:
        """Change some of the operator's values."""
        self._helm("upgrade", "--reuse-values", values=values)

    def is_ready(self) -> bool:
        """Check whether all operands are as the ClusterPolicy wants them."""
        status: Object = self._cluster.get("clusterpolicies.nvidia.com/cluster-policy")["status"]
        return bool(status["state"] == "ready")

    def image(self, name: str) -> str:
        """Return the image that the operator has rendered for an operand."""
        image: str = self._daemon_set(name)["spec"]["template"]["spec"]["containers"][0]["image"]
        return image

    def wait_for_operand(self, name: str, image: str, **environ: str) -> Object:
        """Wait for an operand's one pod, of the newest template and ready; return its metadata.

        Args:
            name: The operand's DaemonSet.
            image: What the pod runs.
            environ: Some of its variables.
        """

        def runs() -> bool:
            return self._is_rolled_out(name, image, environ)

        waiting.until(runs, f"{name} from {image}", within_s=90)
        (pod,) = self._cluster.pods(NAMESPACE, app=name)
        metadata: Object = pod["metadata"]
        return metadata

    def _is_rolled_out(self, name: str, image: str, environ: Mapping[str, str]) -> bool:
        try:
            daemon_set = self._daemon_set(name)
        except RuntimeError:
            return False
        status = daemon_set["status"]
        if status.get("observedGeneration") != daemon_set["metadata"]["generation"]:
            return False
        container = daemon_set["spec"]["template"]["spec"]["containers"][0]
        rendered = {each["name"]: each.get("value", "") for each in container["env"]}
        return (
            container["image"] == image
            and environ.items() <= rendered.items()
            and status.get("updatedNumberScheduled") == status.get("numberReady") == 1
            and len(self._cluster.pods(NAMESPACE, app=name)) == 1
        )

    def _daemon_set(self, name: str) -> Object:
        return self._cluster.get("-n", NAMESPACE, f"daemonset/{name}")

    def _helm(self, command: str, *options: str, values: Object) -> None:
        cluster = self._cluster
        file = cluster.folder / "values.json"
        file.write_text(json.dumps(values))
        chart = _module() / "deployments/gpu-operator"
        done = subprocess.run(
            [
                *(programs.path_or_skip("helm"), command, "gpu-operator", str(chart), *options),
                f"--namespace={NAMESPACE}",
                f"--kubeconfig={cluster.plane.kubeconfig('admin')}",
                f"--values={file}",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


def _image(reference: str) -> Object:
    """Return an image as the operator's values name it."""
    path, _, version = reference.rpartition(":")
    repository, _, name = path.rpartition("/")
    return {"repository": repository, "image": name, "version": version}


@functools.cache
def _module() -> pathlib.Path:
    """Return the folder with the operator's source."""
    # The proxy has its source and not what "go mod download" asks besides.
    package = f"{_MODULE}/cmd/gpu-operator"
    done = subprocess.run(
        [programs.path_or_skip("go"), "list", "-f", "{{.Module.Dir}}", package],
        cwd=envtest.BUILD.parent / "gpu-operator",
        capture_output=True,
        text=True,
        check=True,
    )
    return pathlib.Path(done.stdout.strip())


_VALUES: Object = {
    "nfd": {"enabled": False},
    "operator": _image(images.OPERATOR) | {"resources": None},
    "driver": {"enabled": False},
    "toolkit": {"enabled": False},
    "dcgmExporter": {"enabled": False},
    # Only a shell of it runs, before each operand.
    "validator": _image(images.PLUGIN),
    # It mounts the machine's DMI tables, which not every machine has.
    "gfd": {"enabled": False},
    "devicePlugin": _image(images.PLUGIN)
    # The simulated driver has no device nodes.
    | {"env": [{"name": "PASS_DEVICE_SPECS", "value": "false"}]},
    "mig": {"strategy": "mixed"},
}
