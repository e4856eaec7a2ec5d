"""The device nodes of MIG instances: those that are missing are made, and no others go."""

import errno
import os
import pathlib
import stat
from collections.abc import Iterator

import pytest
import structlog.testing
from structlog.typing import EventDict

from mig_manager import errors, reasons
from mig_manager.adapters.host import device_nodes
from tests.rigs.host import proc_tree

Logs = list[EventDict]
MAJOR = 240  # one of those that are for local use (Linux, ``devices.txt``)


def _may_make_nodes(folder: pathlib.Path) -> bool:
    try:
        os.mknod(folder / "probe", stat.S_IFCHR | 0o400, os.makedev(MAJOR, 0))
    except OSError:
        return False
    return True


@pytest.fixture
def nodes_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a ``/dev`` in which device nodes can be made."""
    if not _may_make_nodes(tmp_path):
        pytest.skip("mknod(2) is not allowed here")
    return dev_tree(tmp_path)


def dev_tree(tmp_path: pathlib.Path) -> pathlib.Path:
    dev = tmp_path / "dev"
    (dev / "char").mkdir(parents=True)
    return dev


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> proc_tree.ProcTree:
    """Return a driver with an instance 3 on GPU 1, which has a compute instance."""
    tree = proc_tree.ProcTree(tmp_path / "proc")
    tree.add_devices({"nvidia": 195, "nvidia-caps-imex-channels": 239, "nvidia-caps": MAJOR})
    tree.add_capabilities(1, {"gi3": 165, "gi3/ci0": 166})
    return tree


@pytest.fixture
def logs() -> Iterator[Logs]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def refresh(proc: proc_tree.ProcTree, dev: pathlib.Path) -> None:
    device_nodes.refresh_nodes(proc=proc.root, dev=dev)


def node(path: pathlib.Path) -> tuple[int, int, int]:
    """Return major, minor and permissions of a character device."""
    status = path.lstat()
    assert stat.S_ISCHR(status.st_mode)
    return os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode)


def make_node(path: pathlib.Path, device: int) -> None:
    os.mknod(path, stat.S_IFCHR | 0o444, device)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_capability_gets_its_device_node(
    proc: proc_tree.ProcTree, nodes_folder: pathlib.Path, logs: Logs
) -> None:
    proc.add_right("config", 1, mode=0o400)
    caps = nodes_folder / "nvidia-caps"
    old = os.umask(0o077)
    try:
        refresh(proc, nodes_folder)
    finally:
        os.umask(old)

    assert names(caps) == ["nvidia-cap1", "nvidia-cap165", "nvidia-cap166"]
    assert node(caps / "nvidia-cap1") == (MAJOR, 1, 0o400)
    assert node(caps / "nvidia-cap165") == (MAJOR, 165, 0o444)
    assert stat.S_IMODE(caps.stat().st_mode) == 0o755
    assert (nodes_folder / "char" / f"{MAJOR}:166").readlink() == pathlib.Path(
        "../nvidia-caps/nvidia-cap166"
    )
    assert logs[0]["made"] == ["nvidia-cap1", "nvidia-cap165", "nvidia-cap166"]


def test_hidden_driver_files_are_read_from_the_hosts_proc(
    proc: proc_tree.ProcTree, nodes_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    host = tmp_path / "host"
    (host / "proc").mkdir(parents=True)
    (proc.root / "driver").rename(host / "proc/driver")
    # The tmpfs of the legacy runtime hook.
    (proc.root / "driver/nvidia").mkdir(parents=True)

    # Without this folder no links are made.
    (nodes_folder / "char").rmdir()

    device_nodes.refresh_nodes(proc=proc.root, dev=nodes_folder, roots=[host])

    assert names(nodes_folder) == ["nvidia-caps"]
    assert names(nodes_folder / "nvidia-caps") == ["nvidia-cap165", "nvidia-cap166"]


def test_missing_capability_files_are_warned_about(
    proc: proc_tree.ProcTree, tmp_path: pathlib.Path, logs: Logs
) -> None:
    (proc.root / "driver").rename(tmp_path / "hidden")

    refresh(proc, dev_tree(tmp_path))

    assert [(each["event"], each["log_level"]) for each in logs] == [
        ("capability_files_not_seen", "warning")
    ]


def test_correct_nodes_and_links_are_not_rewritten(
    proc: proc_tree.ProcTree, nodes_folder: pathlib.Path, logs: Logs
) -> None:
    refresh(proc, nodes_folder)
    paths = [*(nodes_folder / "nvidia-caps").iterdir(), *(nodes_folder / "char").iterdir()]
    before = {path: path.lstat().st_ino for path in paths}
    logs.clear()

    refresh(proc, nodes_folder)

    assert {path: path.lstat().st_ino for path in paths} == before
    assert logs == []


def test_stale_nodes_of_a_reloaded_driver_are_replaced_or_removed(
    proc: proc_tree.ProcTree, nodes_folder: pathlib.Path, logs: Logs
) -> None:
    caps = nodes_folder / "nvidia-caps"
    caps.mkdir()
    for minor in (30, 165):
        make_node(caps / f"nvidia-cap{minor}", os.makedev(MAJOR + 1, minor))
    make_node(caps / "of-another", os.makedev(MAJOR + 1, 30))
    # Created before the driver was loaded with other permissions.
    make_node(caps / "nvidia-cap400", os.makedev(MAJOR, 400))
    proc.add_right("config", 400, mode=0o600)
    # Of an instance that was destroyed: its node stays.
    make_node(caps / "nvidia-cap31", os.makedev(MAJOR, 31))
    (caps / "nvidia-cap166").write_text("no device")
    (nodes_folder / "char" / f"{MAJOR}:165").symlink_to("../elsewhere")

    refresh(proc, nodes_folder)

    assert names(caps) == [
        *("nvidia-cap165", "nvidia-cap166", "nvidia-cap31", "nvidia-cap400", "of-another")
    ]
    assert node(caps / "nvidia-cap400") == (MAJOR, 400, 0o600)
    assert node(caps / "nvidia-cap165")[:2] == (MAJOR, 165)
    assert node(caps / "nvidia-cap166")[:2] == (MAJOR, 166)
    assert (nodes_folder / "char" / f"{MAJOR}:165").resolve() == (caps / "nvidia-cap165").resolve()
    assert logs[0]["made"] == ["nvidia-cap400", "nvidia-cap165", "nvidia-cap166"]
    assert logs[0]["removed"] == ["nvidia-cap30"]


@pytest.mark.parametrize("has_numbers", [True, False])
def test_nodes_managed_elsewhere_or_without_numbers_are_not_created(
    *, has_numbers: bool, proc: proc_tree.ProcTree, tmp_path: pathlib.Path
) -> None:
    dev = dev_tree(tmp_path)
    proc.add_capabilities(1, {"gi3": 165, "gi3/ci0": 166}, modify=0)
    if not has_numbers:
        for access in proc.root.glob("driver/nvidia/capabilities/**/access"):
            access.write_text("")

    refresh(proc, dev)

    assert names(dev) == ["char"]


def test_a_missing_driver_or_dev_is_logged_and_not_an_error(
    tmp_path: pathlib.Path, logs: Logs
) -> None:
    tree = proc_tree.ProcTree(tmp_path / "proc")
    refresh(tree, tmp_path)
    tree.add_devices({"nvidia": 195}, blocks={"nvidia-caps": 9})
    refresh(tree, tmp_path)
    tree.add_devices({"nvidia-caps": MAJOR})
    refresh(tree, tmp_path / "none")

    assert [each["event"] for each in logs] == ["device_files_skipped"] * 3
    assert [each["why"] for each in logs] == [
        "the driver has no MIG capabilities",
        "the driver has no MIG capabilities",
        f"the folder {tmp_path}/none is missing",
    ]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_only_a_missing_permission_to_create_nodes_is_tolerated(
    proc: proc_tree.ProcTree,
    tmp_path: pathlib.Path,
    logs: Logs,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: pathlib.Path, *_: int) -> None:
        raise OSError(code, os.strerror(code), str(path))

    dev = dev_tree(tmp_path)
    monkeypatch.setattr(os, "mknod", refuse)

    if code == errno.ENOSPC:
        with pytest.raises(errors.HostError, match="No space left on device") as caught:
            refresh(proc, dev)
        assert caught.value.reason is reasons.Reason.DEVICE_FILES_FAILED
    else:
        refresh(proc, dev)
        assert logs[0]["event"] == "device_files_skipped"
        assert logs[0]["why"].startswith(f"not allowed: {dev}/nvidia-caps/.nvidia-cap165.new: ")
