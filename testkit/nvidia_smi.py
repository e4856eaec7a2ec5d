"""``nvidia-smi`` of a simulated node: ``python -m testkit.nvidia_smi STATE``.

It has the options that mig-manager uses, for GPUs named with ``-i``: ``-q -x``, ``--gpu-reset``
and ``-pm``. Exit statuses are from ``nvidia-smi(1)``, texts from public logs. Two texts are made
up: the answer to ``-pm``, and the list of linked GPUs, which the manual mentions without its text.
"""

import argparse
import pathlib
import shlex
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from mig_manager.sandbox.driver import state_file, states, transitions
from testkit import nvml_faults

_MODULE = "testkit.nvidia_smi"
_OTHER = 255
_STATUSES = {
    states.Code.NOT_SUPPORTED: 3,
    states.Code.NO_PERMISSION: 4,
    states.Code.NOT_FOUND: 6,
    states.Code.DRIVER_NOT_LOADED: 9,
}
_MODES = {True: "Enabled", False: "Disabled"}
_PERSISTENT = (states.ClientKind.PERSISTENCE_MODE, states.ClientKind.PERSISTENCE_DAEMON)
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
    status, output = answer(arguments)
    sys.stdout.write(f"{output}\n")
    return status


def answer(arguments: Sequence[str] | None = None) -> tuple[int, str]:
    """Return the exit status and the output of ``nvidia-smi``."""
    parser = argparse.ArgumentParser(prog="nvidia-smi")
    parser.add_argument("state", type=pathlib.Path)
    parser.add_argument("-i", "--id", default="")
    parser.add_argument("-x", "--xml-format", action="store_true")
    act = parser.add_mutually_exclusive_group(required=True)
    act.add_argument("-q", "--query", action="store_true")
    act.add_argument("-r", "--gpu-reset", action="store_true")
    act.add_argument("-pm", "--persistence-mode", choices=["0", "1"])
    options = parser.parse_args(arguments)
    state = nvml_faults.SharedState(options.state)
    try:
        boards = _boards_of(state, options.id)
        if options.persistence_mode:
            output = _set_persistence(state, boards, is_on=options.persistence_mode == "1")
        else:
            output = _reset(state, boards) if options.gpu_reset else _query(state, boards)
    except _Refusal as refusal:
        return refusal.status, str(refusal)
    return 0, output


def install(folder: pathlib.Path, state: pathlib.Path) -> pathlib.Path:
    """Write an ``nvidia-smi`` for a simulated node into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    line = shlex.join([sys.executable, "-m", _MODULE, str(state.resolve())])
    program.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def _boards_of(state: state_file.SharedState, ids: str) -> tuple[states.Board, ...]:
    try:
        boards = state.boards
    except FileNotFoundError as error:
        raise _Refusal(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            states.Code.DRIVER_NOT_LOADED,
        ) from error
    if not ids:
        return boards
    by_name: dict[str, states.Board] = {}
    for board in boards:
        address = board.pci_address.lstrip("0")
        by_name |= dict.fromkeys((str(board.index), board.uuid, address), board)
    try:
        return tuple(
            by_name.get(name) or by_name[name.upper().lstrip("0")] for name in ids.split(",")
        )
    except KeyError:
        raise _Refusal("No devices were found", states.Code.NOT_FOUND) from None


def _reset(state: state_file.SharedState, boards: Sequence[states.Board]) -> str:
    outcome = state.reset_gpus([board.index for board in boards])
    names = {board.index: board.pci_address for board in state.boards}
    refused = [names[index] for index in outcome.refused]
    if outcome.missing:
        others = ", ".join(names[index] for index in outcome.missing)
        text = f"GPU {refused[0]} must be reset in one command with the GPUs on its NVLink: "
        raise _Refusal(text + others, outcome.code)
    match outcome.code:
        case states.Code.SUCCESS:
            done = [f"GPU {board.pci_address} was successfully reset." for board in boards]
            return "\n".join([*done, "All done."])
        case states.Code.NO_PERMISSION:
            text = "Unable to reset GPUs: Insufficient Permissions"
        case states.Code.NOT_SUPPORTED:
            text = "\n".join(f"\nResetting GPU {name} is not supported." for name in refused)
        case _:
            are = "device is" if len(refused) == 1 else "devices are"
            lines = [f"  GPU {name}: In use by another client" for name in refused]
            head = "The following GPUs could not be reset:"
            text = "\n".join([head, *lines, "", f"{len(refused)} {are} {_BUSY}"])
    raise _Refusal(text, outcome.code)


def _set_persistence(
    state: state_file.SharedState, boards: Sequence[states.Board], *, is_on: bool
) -> str:
    kind = states.ClientKind.PERSISTENCE_MODE
    for board in boards:
        present = [c for c in state.read().clients_of(board.uuid) if c.kind is kind]
        for client in () if is_on else present:
            state.remove_client(client)
        if is_on and not present:
            state.add_client(board.uuid, name="", kind=kind, pid=0)
    done = [f"{_MODES[is_on]} persistence mode for GPU {b.pci_address}." for b in boards]
    return "\n".join([*done, "All done."])


def _query(state: state_file.SharedState, boards: Sequence[states.Board]) -> str:
    node = state.read()
    root = ET.Element("nvidia_smi_log")
    _add(root, driver_version=node.options.driver_version, attached_gpus=str(len(boards)))
    for board in boards:
        now, clients = node.gpus[board.index], node.clients_of(board.uuid)
        gpu = ET.SubElement(root, "gpu", id=board.pci_address)
        is_persistent = any(client.kind in _PERSISTENT for client in clients)
        _add(gpu, product_name=board.product.name, persistence_mode=_MODES[is_persistent])
        is_capable = board.product.is_mig_capable
        _add(
            ET.SubElement(gpu, "mig_mode"),
            current_mig=_MODES[now.is_enabled] if is_capable else "N/A",
            pending_mig=_MODES[now.is_pending] if is_capable else "N/A",
        )
        devices = ET.SubElement(gpu, "mig_devices")
        for index in range(len(transitions.mig_devices(now))):
            _add(ET.SubElement(devices, "mig_device"), index=str(index))
        if not len(devices):
            devices.text = "None"
        _add(gpu, uuid=board.uuid, minor_number=str(node.minor(board.index)))
        processes = ET.SubElement(gpu, "processes")
        for client in clients:
            if client.kind is states.ClientKind.COMPUTE:
                process = ET.SubElement(processes, "process_info")
                _add(process, pid=str(client.pid), type="C", process_name=client.name)
    ET.indent(root, "\t")
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">'
    return f"{head}\n{ET.tostring(root, encoding='unicode')}"


def _add(parent: ET.Element, **texts: str) -> None:
    """Add elements with a text each."""
    for name, text in texts.items():
        ET.SubElement(parent, name).text = text


if __name__ == "__main__":
    sys.exit(main())
