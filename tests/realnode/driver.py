"""A node's driver: the simulated one behind the C library, and what containers are given of it.

The container runtime's wrapper (``tests/cluster/programs/wrapper``) asks here, over a socket,
before a container with GPUs starts and after it has ended: a line of JSON, and a line in answer.
"""

import contextlib
import json
import pathlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mig_manager.sandbox.driver import state_file, states, transitions
from testkit import nvidia_smi, nvml_faults
from tests.rigs.driver import c_library
from tests.rigs.node import simulated_rig

_NVIDIA_SMI = """\
#!/usr/bin/python3
import json, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("/usr/lib/x86_64-linux-gnu/nvidia-smi.sock")
    connection.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    status, output = json.loads(connection.makefile().readline())
print(output)
sys.exit(status)
"""
"""In containers, where the runtime mounts it; ``testkit.nvidia_smi`` answers outside."""

_GPU_INSTANCES, _COMPUTE_INSTANCES = 15, 8  # how many per GPU the driver numbers (``nv-caps.c``)


class GpuDriver:
    """Simulated GPUs that outlive their node's programs, as real ones do.

    Args:
        folder: What the node sees as ``/run/nvidia/simulated``.
        spec: The GPUs, such as ``2xA100-SXM4-40GB``.
        latency: How long calls take.
    """

    def __init__(
        self, folder: pathlib.Path, spec: str, *, latency: states.Latency | None = None
    ) -> None:
        self._folder = folder
        state = folder.parent / "gpus.json"
        state_file.SharedState(state).create(
            spec, options=states.Options(latency=latency or states.Latency())
        )
        self.gpus = nvml_faults.SharedState(state)
        self._clients: dict[str, list[states.Client]] = {}
        self._write_proc()
        self._write_bus()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answer the library's calls and the runtime's questions."""
        program = self._folder / "nvidia-smi"
        program.write_text(_NVIDIA_SMI, encoding="utf-8")
        program.chmod(0o755)
        with (
            c_library.serve(self._folder, self.gpus.path),
            self._serving("containers.sock", self._answer),
            self._serving("nvidia-smi.sock", self._run_nvidia_smi),
        ):
            yield

    @contextlib.contextmanager
    def _serving(self, name: str, answer: Callable[[Any], str]) -> Iterator[None]:
        """Answer each line of JSON on a socket with one line."""

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(answer(json.loads(self.rfile.readline())).encode() + b"\n")

        path = str(self._folder / name)
        with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield
            finally:
                server.shutdown()

    def _run_nvidia_smi(self, arguments: list[str]) -> str:
        return json.dumps(nvidia_smi.answer([str(self.gpus.path), *arguments]))

    def profiles(self) -> list[list[str]]:
        """Return the names of each GPU's instances, in the order of their placements."""
        node = self.gpus.read()
        return [
            [
                board.row(instance.profile_id).name
                for instance in sorted(gpu.instances, key=lambda each: each.placement.start)
            ]
            for board, gpu in zip(self.gpus.boards, node.gpus, strict=True)
        ]

    def instances(self) -> set[int]:
        """Return the serial numbers of all GPU instances; a new instance has a new one."""
        return {each.serial for gpu in self.gpus.read().gpus for each in gpu.instances}

    def serials(self) -> dict[str, int]:
        """Return the serial number of each MIG device's GPU instance, by the device's UUID."""
        return {
            board.mig_uuid(instance, compute): instance.serial
            for board, gpu in zip(self.gpus.boards, self.gpus.read().gpus, strict=True)
            for instance, compute in transitions.mig_devices(gpu)
        }

    def devices(self) -> set[str]:
        """Return the UUIDs of all MIG devices."""
        return set(simulated_rig.devices(self.gpus))

    def reboot(self) -> None:
        """Be as after a boot of the machine."""
        self._clients.clear()
        # A call that hangs must not do its work after the boot.
        with self._without_calls():
            self.gpus.reboot()

    @contextlib.contextmanager
    def _without_calls(self) -> Iterator[None]:
        """Wait for the ends of all calls that change a GPU, and let none begin."""
        with contextlib.ExitStack() as calls:
            for gpu in range(len(self.gpus.boards)):
                calls.enter_context(self.gpus.gpu_lock(gpu))
            yield

    def _write_proc(self) -> None:
        """Write the driver's files below ``/proc/driver``."""
        proc = self._folder / "proc"
        for each in ("nvidia-caps", "nvidia/capabilities/mig", "nvidia/params"):
            (proc / each).parent.mkdir(parents=True, exist_ok=True)
        (proc / "nvidia-caps").mkdir()
        names = ["config", "monitor"]
        for gpu in range(len(self.gpus.boards)):
            for instance in range(_GPU_INSTANCES):
                names.append(f"gpu{gpu}/gi{instance}/access")
                names += [
                    f"gpu{gpu}/gi{instance}/ci{compute}/access"
                    for compute in range(_COMPUTE_INSTANCES)
                ]
        lines = [f"{name} {minor}\n" for minor, name in enumerate(names, 1)]
        (proc / "nvidia-caps/mig-minors").write_text("".join(lines))

    def _write_bus(self) -> None:
        """Write what the kernel shows of the GPUs on the PCI bus."""
        for board in self.gpus.boards:
            # The kernel writes domains with four digits, NVML with eight.
            device = self._folder / "pci" / board.pci_address[4:].lower()
            device.mkdir(parents=True)
            packed = board.product.pci_device_ids[0]
            files = {
                "vendor": f"{packed & 0xFFFF:#06x}",
                "device": f"{packed >> 16:#06x}",
                "class": "0x030200",
                "numa_node": "-1",
                "resource": "0x0 0x0 0x0",
                "config": "",
            }
            for name, content in files.items():
                (device / name).write_text(f"{content}\n")

    def _answer(self, request: dict[str, Any]) -> str:
        """Hold what a container was given, or let go of it; return what is wrong, or nothing."""
        if request["status"] == "stopped":
            # The kernel ends no process before the driver has returned from its call.
            with self._without_calls():
                pass
            for client in self._clients.pop(request["id"], ()):
                self.gpus.remove_client(client)
            return ""
        clients = self._clients.setdefault(request["id"], [])
        try:
            for device in request["devices"]:
                clients.append(self.gpus.add_client(device, name="workload", pid=request["pid"]))
        except LookupError as error:
            for client in self._clients.pop(request["id"]):
                self.gpus.remove_client(client)
            return str(error)
        return ""
