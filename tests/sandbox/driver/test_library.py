"""Our workers, and clients that share nothing with us, over a library that the loader loads."""

import ctypes
import json
import pathlib
import struct
import sys
import tempfile
from collections.abc import Iterator

import pynvml
import pytest

from mig_manager.sandbox.driver import calls, state_file
from testkit import nvml_faults
from tests.rigs import programs
from tests.rigs.cluster import kubelet_rig
from tests.rigs.driver import c_library
from tests.rigs.shell import commandline

_FOLDER = pathlib.Path(__file__).parent
_FILL = """
version: v1
mig-configs:
  mixed:
  - devices: [0]
    mig-enabled: true
    mig-devices: {1g.5gb: 2, 2g.10gb: 1}
"""
_PYNVML_NAMES = {"nvmlPciInfo_t": "nvmlPciInfo_t", "nvmlProcessInfo_t": "c_nvmlProcessInfo_v3_t"}
"""Structs that pynvml calls otherwise than ``c_`` and the header's name."""
_WIDER_IN_PYNVML = {("nvmlGpuFabricInfo_t", "state", 24, 1): 4}
"""Size in pynvml of a field that it reads together with the padding after it."""


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[commandline.Shell]:
    shell = commandline.Shell(tmp_path)
    shell.environ |= c_library.environ(tmp_path)
    yield shell
    commandline.forget()


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "node.json"
    state_file.SharedState(path).create("2xA100-SXM4-40GB")
    return path


@pytest.fixture
def library_file(tmp_path: pathlib.Path, state: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give the file of a library that the simulated driver answers."""
    with c_library.serve(tmp_path / "library", state) as file:
        yield file


def fields_of(source: str, folder: pathlib.Path) -> set[tuple[str, str, int, int]]:
    """Return struct, field, offset and size of each struct that a C file declares."""
    program = folder / "layout"
    declared_by = f'-DNVML_SOURCE="{source}"'
    c_library.run(programs.path_or_skip("cc"), declared_by, f"-o{program}", _FOLDER / "layout.c")
    printed = c_library.run(program)
    rows = (line.split() for line in printed.splitlines())
    return {(kind, field, int(offset), int(size)) for kind, field, offset, size in rows}


def pynvml_field(kind: str, field: str) -> tuple[int, int]:
    """Return offset and size of a field, or of the whole struct for the field ``.``."""
    declared = getattr(pynvml, _PYNVML_NAMES.get(kind, f"c_{kind}"))
    if field == ".":
        return 0, ctypes.sizeof(declared)
    described = getattr(declared, field)
    return described.offset, described.size


def test_library_exports_the_simulated_drivers_functions_exactly(tmp_path: pathlib.Path) -> None:
    file = c_library.build(tmp_path)

    listed = c_library.run("nm", "--dynamic", "--defined-only", file)
    exported = {line.split()[-1] for line in listed.splitlines()}

    cuda = {"cuInit", "cuDeviceGet", "cuCtxCreate_v2"}
    assert exported == {*calls.FUNCTIONS, "nvmlErrorString", *cuda}


def test_structs_of_the_library_are_laid_out_as_pynvml_lays_them_out(
    tmp_path: pathlib.Path,
) -> None:
    fields = fields_of(str(c_library.SOURCE), tmp_path)

    assert len(fields) > 80
    expected = {(*row[:3], _WIDER_IN_PYNVML.get(row, row[3])) for row in fields}
    assert expected == {(kind, field, *pynvml_field(kind, field)) for kind, field, _, _ in fields}


@pytest.mark.slow
def test_structs_of_the_library_are_laid_out_as_in_nvidias_header(tmp_path: pathlib.Path) -> None:
    # Unlike ``go list`` it says where the module is only once it is there.
    folder = json.loads(go("mod", "download", "-json", "github.com/NVIDIA/go-nvml"))["Dir"]

    theirs = fields_of(f"{folder}/pkg/nvml/nvml.h", tmp_path)

    assert fields_of(str(c_library.SOURCE), tmp_path) == theirs


def test_pynvml_loads_the_library_and_reads_the_node_and_its_events(
    library_file: pathlib.Path,
) -> None:
    program = """
import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    print(pynvml.nvmlDeviceGetName(device), pynvml.nvmlDeviceGetPciInfo(device).busId)
try:
    pynvml.nvmlDeviceGetHandleByIndex(2)
except pynvml.NVMLError_InvalidArgument as error:
    print(error)
events = pynvml.nvmlEventSetCreate()
pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventMigConfigChange, events)
pynvml.nvmlDeviceSetMigMode(device, 1)
data = pynvml.nvmlEventSetWait_v2(events, 5000)
print(pynvml.nvmlDeviceGetIndex(data.device), data.eventType == pynvml.nvmlEventMigConfigChange)
pynvml.nvmlShutdown()
"""

    folder = str(library_file.parent)
    printed = c_library.run(sys.executable, "-c", program, LD_LIBRARY_PATH=folder)

    assert printed.splitlines() == [
        "NVIDIA A100-SXM4-40GB 00000000:07:00.0",
        "NVIDIA A100-SXM4-40GB 00000000:0F:00.0",
        "Invalid Argument",
        "1 True",
    ]


@pytest.mark.slow
def test_a_layout_is_applied_through_the_library_and_every_command_sees_it(
    shell: commandline.Shell, state: pathlib.Path, library_file: pathlib.Path
) -> None:
    at = ("--library-path", str(library_file))
    layout = ("--config-file", "-", "--selected-config", "mixed")

    applied = shell("apply", *at, *layout, stdin=_FILL)
    asserted = shell("assert", *at, *layout, stdin=_FILL)
    answer = shell("status", *at, "-o", "json")
    simulated = shell("status", "--simulate-state", str(state), "-o", "json")

    assert applied.status == 0, applied.err
    assert asserted.status == 0
    assert instances(state) == ["1g.5gb", "1g.5gb", "2g.10gb"]
    assert answer.data == simulated.data


@pytest.mark.slow
def test_apply_queries_the_kubelet_of_this_machine_by_default(
    shell: commandline.Shell, state: pathlib.Path, library_file: pathlib.Path
) -> None:
    line = ("apply", "--library-path", str(library_file), "all-1g.5gb")
    (first, _) = shell("status", *line[1:3], "-o", "json").data["gpus"]
    pod = kubelet_rig.pod("train", kubelet_rig.devices("nvidia.com/gpu", first["uuid"]))
    with tempfile.TemporaryDirectory(prefix="mm") as root:
        folder = pathlib.Path(root, "var/lib/kubelet/pod-resources")
        folder.mkdir(parents=True)
        kubelet = kubelet_rig.GrpcKubelet(folder / "kubelet.sock")
        kubelet.pods = [pod]
        kubelet.start()

        refused = shell(*line, HOST_ROOT_MOUNT=root)

        kubelet.stop()
    assert refused.status == 1
    assert "destroys or resets: ns/train (GPU 0);" in " ".join(refused.err.split())
    assert instances(state) == []


def test_commands_report_that_no_driver_is_behind_the_library(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    file = c_library.build(tmp_path / "library")

    answer = shell("status", "--library-path", str(file))

    assert answer.status == 1
    assert "'Driver Not Loaded'" in answer.err


def test_a_write_past_the_memory_of_a_client_is_detected() -> None:
    session = nvml_faults.CountingLibrary(nvml_faults.SharedState(pathlib.Path("none.json")))
    too_small = b"m" + struct.pack("=Q", 4) + bytes(4)
    code = b"v" + struct.pack("=Q", 0)

    with pytest.raises(BufferError, match="nvmlErrorString"):
        c_library._answer(session, b"nvmlErrorString\0" + bytes([2]) + code + too_small)


@pytest.mark.slow
def test_nvidias_go_binding_sees_the_instances_that_we_made(
    shell: commandline.Shell,
    tmp_path: pathlib.Path,
    state: pathlib.Path,
    library_file: pathlib.Path,
) -> None:
    client = tmp_path / "client"
    go("build", "-o", str(client), ".")
    at = ("--library-path", str(library_file))
    shell("apply", *at, "--config-file", "-", "--selected-config", "mixed", stdin=_FILL)

    printed = c_library.run(client, library_file).splitlines()

    gpus = shell("status", "--simulate-state", str(state), "-o", "json").data["gpus"]
    uuids = {
        device["uuid"]
        for gpu in gpus
        for instance in gpu["gpuInstances"]
        for device in instance["computeInstances"]
    }
    assert {line.split()[1] for line in printed if line.startswith("device")} == uuids
    assert [line.split()[2] for line in printed if line.startswith("gpu")] == [
        gpu["uuid"] for gpu in gpus
    ]
    assert len([line for line in printed if line.startswith("instance")]) == 3


def instances(state: pathlib.Path) -> list[str]:
    """Return the profiles of the GPU instances that the driver has."""
    shared = nvml_faults.SharedState(state)
    return sorted(
        board.row(instance.profile_id).name
        for board, gpu in zip(shared.boards, shared.read().gpus, strict=True)
        for instance in gpu.instances
    )


def go(*arguments: str) -> str:
    return c_library.run(
        programs.path_or_skip("go"), *arguments, folder=_FOLDER / "go_client"
    ).strip()
