"""``nvidia-smi`` of a simulated node: ``python -m mig_manager.sandbox.driver.nvidia_smi STATE``.

It has the options that mig-manager uses, for GPUs named with ``-i``: ``-q -x``, ``--gpu-reset``
and ``-pm``. Exit statuses are those of ``nvidia-smi(1)``; texts are as seen in public logs. Two
are made up: the answer of ``-pm``, and the one about linked GPUs: the manual says only
that it names them.
"""

import argparse
import pathlib
import shlex
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from mig_manager.sandbox.driver import state_file, states, transitions

_MODULE = "mig_manager.sandbox.driver.nvidia_smi"
_OTHER = 255
_STATUSES = {
    states.Code.NOT_SUPPORTED: 3,
    states.Code.NO_PERMISSION: 4,
    states.Code.NOT_FOUND: 6,
    states.Code.DRIVER_NOT_LOADED: 9,
}
_VIRTUALIZATIONS = {
    states.Virtualization.NONE: "None",
    states.Virtualization.PASSTHROUGH: "Pass-Through",
    states.Virtualization.VGPU: "VGPU",
}
_BUSY = (
    "currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
    "graphics application such as an X server, or a monitoring application such as another "
    "instance of nvidia-smi)."
)


class _Refusal(Exception):  # noqa: N818 - an answer
    """The output of a failure, with its exit status."""

    def __init__(self, text: str, code: states.Code) -> None:
        super().__init__(text)
        self.status = _STATUSES.get(code, _OTHER)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``nvidia-smi`` and return its exit status."""
    parser = argparse.ArgumentParser(prog="nvidia-smi")
    parser.add_argument("state", type=pathlib.Path)
    parser.add_argument("-i", "--id", default="")
    parser.add_argument("-x", "--xml-format", action="store_true")
    act = parser.add_mutually_exclusive_group(required=True)
    act.add_argument("-q", "--query", action="store_true")
    act.add_argument("-r", "--gpu-reset", action="store_true")
    act.add_argument("-pm", "--persistence-mode", choices=["0", "1"])
    asked = parser.parse_args(arguments)
    state = state_file.SharedState(asked.state)
    try:
        chosen = _chosen(state, asked.id)
        if asked.persistence_mode:
            output = _set_persistence(state, chosen, is_on=asked.persistence_mode == "1")
        else:
            output = _reset(state, chosen) if asked.gpu_reset else _query(state, chosen)
        status = 0
    except _Refusal as refusal:
        output, status = str(refusal), refusal.status
    sys.stdout.write(f"{output}\n")
    return status


def install(folder: pathlib.Path, state: pathlib.Path) -> pathlib.Path:
    """Write an ``nvidia-smi`` for a simulated node into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    line = shlex.join([sys.executable, "-m", _MODULE, str(state.resolve())])
    program.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def _chosen(state: state_file.SharedState, ids: str) -> tuple[states.Board, ...]:
    try:
        boards = state.boards
    except FileNotFoundError as error:
        raise _Refusal(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            states.Code.DRIVER_NOT_LOADED,
        ) from error
    if not ids:
        return boards
    found = tuple(board for each in ids.split(",") for board in boards if _has_id(board, each))
    if len(found) != len(ids.split(",")):
        raise _Refusal("No devices were found", states.Code.NOT_FOUND)
    return found


def _has_id(board: states.Board, name: str) -> bool:
    address = board.pci_address.lstrip("0")
    return name in (str(board.index), board.uuid) or name.upper().lstrip("0") == address


def _reset(state: state_file.SharedState, chosen: Sequence[states.Board]) -> str:
    answer = state.reset_gpus([board.index for board in chosen])
    if answer.code is not states.Code.SUCCESS:
        raise _Refusal(_refusal(state, answer), answer.code)
    done = [f"GPU {board.pci_address} was successfully reset." for board in chosen]
    return "\n".join([*done, "All done."])


def _set_persistence(
    state: state_file.SharedState, chosen: Sequence[states.Board], *, is_on: bool
) -> str:
    kind = states.ClientKind.PERSISTENCE_MODE
    for board in chosen:
        present = [c for c in state.read().clients_of(board.uuid) if c.kind is kind]
        for client in () if is_on else present:
            state.remove_client(client)
        if is_on and not present:
            state.add_client(board.uuid, name="", kind=kind, pid=0)
    mode = "Enabled" if is_on else "Disabled"
    done = [f"{mode} persistence mode for GPU {board.pci_address}." for board in chosen]
    return "\n".join([*done, "All done."])


def _refusal(state: state_file.SharedState, answer: transitions.ResetResult) -> str:
    names = {board.index: board.pci_address for board in state.boards}
    refused = [names[index] for index in answer.refused]
    if answer.missing:
        others = ", ".join(names[index] for index in answer.missing)
        return (
            f"GPU {refused[0]} must be reset in one command with the GPUs on its NVLink: {others}"
        )
    if answer.code is states.Code.NO_PERMISSION:
        return "Unable to reset GPUs: Insufficient Permissions"
    if answer.code is states.Code.NOT_SUPPORTED:
        return "\n".join(f"\nResetting GPU {name} is not supported." for name in refused)
    are = "device is" if len(refused) == 1 else "devices are"
    lines = [f"  GPU {name}: In use by another client" for name in refused]
    return "\n".join(
        ["The following GPUs could not be reset:", *lines, "", f"{len(refused)} {are} {_BUSY}"]
    )


def _query(state: state_file.SharedState, chosen: Sequence[states.Board]) -> str:
    node = state.read()
    root = ET.Element("nvidia_smi_log")
    ET.SubElement(root, "driver_version").text = node.options.driver_version
    ET.SubElement(root, "attached_gpus").text = str(len(chosen))
    for board in chosen:
        _add_gpu(root, node, board)
    ET.indent(root, "\t")
    document = ET.tostring(root, encoding="unicode")
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">'
    return f"{head}\n{document}"


def _add_gpu(root: ET.Element, node: states.NodeState, board: states.Board) -> None:
    now = node.gpus[board.index]
    gpu = ET.SubElement(root, "gpu", id=board.pci_address)
    ET.SubElement(gpu, "product_name").text = board.product.name
    is_persistent = any(
        client.kind in (states.ClientKind.PERSISTENCE_MODE, states.ClientKind.PERSISTENCE_DAEMON)
        for client in node.clients_of(board.uuid)
    )
    ET.SubElement(gpu, "persistence_mode").text = _mode(is_persistent)
    mode = ET.SubElement(gpu, "mig_mode")
    is_capable = board.product.is_mig_capable
    for name, is_on in (("current_mig", now.is_enabled), ("pending_mig", now.is_pending)):
        ET.SubElement(mode, name).text = _mode(is_on) if is_capable else "N/A"
    _add_instances(gpu, now)
    ET.SubElement(gpu, "uuid").text = board.uuid
    ET.SubElement(gpu, "minor_number").text = str(node.minor(board.index))
    virtual = ET.SubElement(gpu, "gpu_virtualization_mode")
    ET.SubElement(virtual, "virtualization_mode").text = _VIRTUALIZATIONS[
        node.options.virtualization
    ]
    processes = ET.SubElement(gpu, "processes")
    for client in node.clients_of(board.uuid):
        if client.kind is states.ClientKind.COMPUTE:
            process = ET.SubElement(processes, "process_info")
            ET.SubElement(process, "pid").text = str(client.pid)
            ET.SubElement(process, "type").text = "C"
            ET.SubElement(process, "process_name").text = client.name


def _add_instances(gpu: ET.Element, now: states.GpuState) -> None:
    devices = ET.SubElement(gpu, "mig_devices")
    for index, (instance, compute) in enumerate(transitions.mig_devices(now)):
        device = ET.SubElement(devices, "mig_device")
        ET.SubElement(device, "index").text = str(index)
        ET.SubElement(device, "gpu_instance_id").text = str(instance.instance_id)
        ET.SubElement(device, "compute_instance_id").text = str(compute.instance_id)
    if not len(devices):
        devices.text = "None"


def _mode(is_on: bool) -> str:  # noqa: FBT001 - one word for one value
    return "Enabled" if is_on else "Disabled"


if __name__ == "__main__":
    sys.exit(main())
