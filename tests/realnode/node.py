"""One node: containerd and kubelet in namespaces of their own, beneath them a simulated driver."""

import json
import pathlib
import shutil
import subprocess
import uuid

from tests.realnode import control, images, namespaces
from tests.rigs import waiting

_KUBELET = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: %(cgroup)s
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
enforceNodeAllocatable: []
makeIPTablesUtilChains: false
evictionHard: {}
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
syncFrequency: 10s
nodeStatusUpdateFrequency: 10s
"""
_CONTAINERD = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "%(pause)s"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "nvidia"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "%(runtime)s"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "%(cni)s"
"""
_BUS = """
<busconfig>
  <listen>unix:path=/run/dbus/system_bus_socket</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><allow send_destination="*"/><allow receive_sender="*"/>
  </policy>
</busconfig>
"""


class RealNode:
    """The programs of one node, and a folder with their files and logs."""

    def __init__(
        self, name: str, number: int, programs: pathlib.Path, folder: pathlib.Path, cgroup: str
    ) -> None:
        self.name = name
        self._number = number
        self._programs = programs
        self.folder = folder
        self._cgroup = cgroup
        self._spaces: namespaces.Namespaces | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def spaces(self) -> namespaces.Namespaces:
        assert self._spaces is not None
        return self._spaces

    def install(self, disk: pathlib.Path) -> None:
        """Give the new node containerd's folder from another, with its images."""
        state = self.folder / "var/lib/containerd"
        state.parent.mkdir(parents=True)
        # It replaces files and never writes to one, except for its databases.
        copy = ["cp", "--archive", str(disk), str(state)]
        if subprocess.run([*copy, "--link"], capture_output=True, check=False).returncode:
            shutil.rmtree(state, ignore_errors=True)
            subprocess.run(copy, check=True)
        for database in disk.rglob("*.db"):
            (copied := state / database.relative_to(disk)).unlink()
            shutil.copy(database, copied)

    def boot(self, plane: control.ControlPlane) -> None:
        """Start the node; what it had on its disk before is there again."""
        # Each boot has another, which the driver's wrapper shows to containers too.
        (self.folder / "driver/boot_id").write_text(f"{uuid.uuid4()}\n")
        self._spaces = spaces = namespaces.machine(self.name, self._number, self.folder)
        self._write_configuration()
        plane.kubeconfig(f"system:node:{self.name}", self.folder / "kubeconfig")
        # What kube-proxy would do for the one Service that is needed.
        for chain in ("PREROUTING", "OUTPUT"):
            to = f"{namespaces.CONTROL_IP}:{control.PORT}"
            spaces.run(
                *f"iptables -t nat -A {chain} -d {control.SERVICE_IP} -p tcp --dport 443".split(),
                *f"-j DNAT --to-destination {to}".split(),
            )
        self.start_containerd()
        self.start_kubelet()

    def halt(self) -> None:
        """End every process of the node at once, as a power cut does."""
        if self._spaces is not None:
            self._spaces.end()
            self._spaces = None
            for process in self._processes.values():
                process.wait(20)
            self._processes.clear()

    def start_containerd(self) -> None:
        """Start containerd; return when it notices what its containers do.

        It answers earlier, and a container that ends between runs for ever in kubelet's eyes.
        """
        log = self.folder / "containerd.log"
        size = log.stat().st_size if log.exists() else 0
        self._start("containerd", "containerd", "--config", self.folder / "containerd.toml")
        waiting.until(
            lambda: b"Start event monitor" in log.read_bytes()[size:], "containerd", within_s=60
        )

    def start_kubelet(self) -> None:
        self._start(
            "kubelet",
            self._programs / "kubelet",
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={self.folder / 'kubeconfig'}",
            f"--hostname-override={self.name}",
            f"--node-ip=10.77.0.{10 + self._number}",
            "--v=2",
        )

    def start_bus(self) -> None:
        """Start the host's D-Bus, without any service on it."""
        configuration = self.folder / "dbus.conf"
        configuration.write_text(_BUS)
        self.spaces.run("mkdir", "-p", "/run/dbus")
        self._start("dbus", "dbus-daemon", "--nofork", f"--config-file={configuration}")

    def kill(self, name: str) -> None:
        """Kill containerd or kubelet; containers go on."""
        self.spaces.run("pkill", "-KILL", "-x", name)
        self._processes.pop(name).wait(20)

    def kill_container(self, identity: str) -> None:
        """Kill every process of a container."""
        self.signal(identity, "SIGKILL")

    def signal(self, identity: str, name: str) -> None:
        """Send every process of a container a signal, such as ``SIGSTOP``."""
        self.spaces.run(
            *["ctr", "--namespace=k8s.io", "tasks", "kill", "--all", f"--signal={name}"], identity
        )

    def containers(self) -> set[str]:
        """Return the ids of the containers whose first process runs."""
        lines = self.spaces.run("ctr", "--namespace=k8s.io", "tasks", "list").splitlines()[1:]
        return {line.split()[0] for line in lines if line.endswith("RUNNING")}

    def devices_by_uid(self) -> dict[str, set[str]]:
        """Return kubelet's own note of each pod's devices, by its UID."""
        note = self.folder / "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
        devices: dict[str, set[str]] = {}
        for entry in json.loads(note.read_text())["Data"]["PodDeviceEntries"] or ():
            for each in entry["DeviceIDs"].values():
                devices.setdefault(entry["PodUID"], set()).update(each)
        return devices

    def import_image(self, archive: pathlib.Path) -> None:
        self.spaces.run("ctr", "--namespace=k8s.io", "images", "import", archive)

    def _start(self, name: str, *command: str | pathlib.Path) -> None:
        self._processes[name] = self.spaces.start(self.folder / f"{name}.log", *command)

    def _write_configuration(self) -> None:
        cni = self.folder / "cni"
        cni.mkdir(exist_ok=True)
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": True,
                    "ipMasq": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": f"10.88.{self._number}.0/24"}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (cni / "pods.conflist").write_text(json.dumps(network))
        (self.folder / "kubelet.yaml").write_text(_KUBELET % {"cgroup": self._cgroup})
        runtime = self._programs / "nvidia-container-runtime"
        (self.folder / "containerd.toml").write_text(
            _CONTAINERD % {"runtime": runtime, "cni": cni, "pause": images.PAUSE}
        )
