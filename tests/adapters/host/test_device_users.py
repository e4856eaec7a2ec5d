"""Who has a GPU's device nodes open, read from a ``/proc`` of the test's own making."""

import os
import pathlib
import subprocess
import sys
import uuid

import pytest

from mig_manager.adapters.host import device_users, procfs
from tests.rigs.host.proc_tree import ProcTree

UID = "8a3f6c1e-0b2d-4c5e-9f70-1a2b3c4d5e6f"
UNDERSCORED = UID.replace("-", "_")
STATIC_UID = "0123456789abcdef0123456789abcdef"


def test_a_process_with_open_device_nodes_is_a_gpu_process(proc: ProcTree) -> None:
    proc.add(
        *(41, "/dev/null", "/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap12"),
        name="nv-hostengine",
        cgroup="0::/system.slice/nvidia-dcgm.service",
    )
    proc.add(42, "/dev/null", "socket:[1]", "/dev/nvidia-uvm", "/dev/nvidia-modeset")
    proc.add(43, "/dev/nvidiactl")
    first, second = device_users.find_users(proc.root)
    assert first == device_users.DeviceFileUser(
        pid=41,
        name="nv-hostengine",
        owner="unit nvidia-dcgm.service",
        gpus=frozenset({3}),
        caps=frozenset({12}),
        drm=frozenset(),
    )
    assert (second.pid, second.gpus) == (43, frozenset())
    assert str(first) == "nv-hostengine (pid 41, unit nvidia-dcgm.service)"
    assert str(second) == "python3 (pid 43)"


@pytest.mark.parametrize(
    ("link", "is_gpu"),
    [
        pytest.param("/dev/nvidia3", True, id="plain"),
        pytest.param("/dev/nvidia3 (deleted)", True, id="removed since"),
        pytest.param("/run/nvidia/driver/dev/nvidia3", True, id="below a driver's root"),
        pytest.param("/dev/nvidia31", False, id="another GPU"),
        pytest.param("/srv/nvidia3", False, id="no device"),
        pytest.param("/dev/nvidia3/x", False, id="below it"),
        pytest.param("/dev/nvidia3 and more", False, id="a longer name"),
    ],
)
def test_only_the_device_node_of_the_gpu_counts(
    link: str,
    is_gpu: bool,  # noqa: FBT001 - a parameter of the table above
    proc: ProcTree,
) -> None:
    proc.add(41, link)
    assert bool(device_users.using_gpu(device_users.find_users(proc.root), 3)) is is_gpu


@pytest.mark.parametrize(
    ("cgroup", "owner"),
    [
        pytest.param(
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-1f.scope",
            f"pod {UID}",
            id="v2 systemd",
        ),
        pytest.param(f"0::/kubepods/besteffort/pod{UID}/1f", f"pod {UID}", id="v2 cgroupfs"),
        pytest.param(
            f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-1f.scope",
            f"pod {UID}",
            id="guaranteed",
        ),
        pytest.param(
            f"12:devices:/kubepods/burstable/pod{UID}/1f\n1:name=systemd:/kubepods/burstable/x",
            f"pod {UID}",
            id="v1 cgroupfs",
        ),
        pytest.param(
            f"12:pids:/kubepods.slice/kubepods-besteffort.slice/"
            f"kubepods-besteffort-pod{UNDERSCORED}.slice/docker-1f.scope\n0::/",
            f"pod {UID}",
            id="v1 systemd",
        ),
        pytest.param(
            f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice/x",
            f"pod {UID}",
            id="kubelet below a slice of its own",
        ),
        pytest.param(f"0::/../../pod{UID}/1f", f"pod {UID}", id="seen from another pod"),
        pytest.param(
            f"0::/kubepods/burstable/pod{STATIC_UID}/1f", f"pod {STATIC_UID}", id="static pod"
        ),
        pytest.param(
            "0::/system.slice/nvidia-persistenced.service",
            "unit nvidia-persistenced.service",
            id="unit",
        ),
        pytest.param(
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-jupyter.service",
            "unit app-jupyter.service",
            id="unit of a user",
        ),
        pytest.param(
            "0::/system.slice/kubelet.service/x", "unit kubelet.service", id="below a unit"
        ),
        pytest.param(
            "0::/user.slice/user-1000.slice/session-3.scope", "unit session-3.scope", id="login"
        ),
        pytest.param("0::/system.slice/docker-1f.scope", "", id="container of no known owner"),
        pytest.param("0::/", "", id="root"),
        pytest.param("", "", id="empty"),
        pytest.param("0::/tripod-8a3f6c1e/x", "", id="only looks like it"),
    ],
)
def test_the_owner_of_a_process_is_in_its_cgroup(cgroup: str, owner: str, proc: ProcTree) -> None:
    proc.add(41, "/dev/nvidia0", cgroup=cgroup)
    (process,) = device_users.find_users(proc.root)
    assert process.owner == owner


def test_a_vanished_or_unreadable_process_is_skipped(proc: ProcTree) -> None:
    proc.add(41, "/dev/nvidia0")
    (proc.root / "42").mkdir()
    half = proc.add(43, "/dev/nvidia0")
    for file in ("comm", "cgroup", "stat"):
        (half / file).unlink()
    # A file where a folder is expected is as unreadable to root as to anybody.
    (proc.root / "44").mkdir()
    (proc.root / "44/fd").write_text("")
    proc.add(45, "/dev/null")
    (proc.root / "45/fd/9").write_text("not a link")
    assert [str(process) for process in device_users.find_users(proc.root)] == [
        "python3 (pid 41)",
        "process (pid 43)",
    ]


def test_our_own_processes_are_ignored(proc: ProcTree) -> None:
    proc.add(100, "/dev/nvidia0", name="mig-manager")
    proc.add(101, "/dev/nvidia0", name="a) R 1 (b", parent=100)
    proc.add(102, "/dev/nvidia0", parent=101)
    processes = device_users.find_users(proc.root, ignore=(100,))
    assert [process.pid for process in processes] == [102]


def test_a_name_cannot_forge_lines_or_escape_sequences(proc: ProcTree) -> None:
    proc.add(41, "/dev/nvidia0", name="a\x1b[2J\nb", cgroup="0::/x/\x1b[2J.service")
    (process,) = device_users.find_users(proc.root)
    assert str(process) == "a?[2J?b (pid 41, unit ?[2J.service)"


def test_capabilities_show_the_instance_of_each_cap_node(proc: ProcTree) -> None:
    proc.add_capabilities(2, {"gi3": 300, "gi3/ci0": 301, "gi3/ci1": 302, "gi11": 400})
    proc.add_capabilities(0, {"gi3": 30})
    (proc.root / "driver/nvidia/capabilities/gpu2/mig/gi7").mkdir()
    (proc.root / "driver/nvidia/capabilities/gpu2/mig/gi7/access").write_text("nonsense")
    assert device_users.capabilities(proc.root, 2) == {
        300: (3, None),
        301: (3, 0),
        302: (3, 1),
        400: (11, None),
    }


def test_a_gpu_is_used_through_its_node_or_the_cap_nodes_of_its_instances(proc: ProcTree) -> None:
    proc.add_capabilities(2, {"gi3": 300, "gi3/ci0": 301, "gi4": 400, "gi4/ci0": 401})
    caps = "/dev/nvidia-caps/nvidia-cap"
    proc.add(41, "/dev/nvidia2", f"{caps}300", f"{caps}301")
    proc.add(42, "/dev/nvidia2", f"{caps}400", f"{caps}401")
    proc.add(43, "/dev/nvidia2", f"{caps}1", name="nv-hostengine")
    proc.add(44, "/dev/nvidia3")
    proc.add(45, f"{caps}301 (deleted)")
    processes = device_users.find_users(proc.root)
    cap_nodes = device_users.capabilities(proc.root, 2)
    assert [process.pid for process in device_users.using_gpu(processes, 2, caps=cap_nodes)] == [
        41,
        42,
        43,
        45,
    ]


def test_a_node_in_dev_dri_belongs_to_the_gpu_of_its_pci_address(proc: ProcTree) -> None:
    proc.add_drm("0001:c7:00.0", "card1", "renderD129")
    proc.add(41, "/dev/dri/renderD129")
    proc.add(42, "/dev/dri/card0", "/dev/dri/renderD128")
    proc.add(43, "/run/nvidia/driver/dev/dri/card1")
    processes = device_users.find_users(proc.root)
    nodes = device_users.drm_nodes(proc.root, "00000001:C7:00.0")
    assert nodes == {"card1", "renderD129"}
    assert device_users.drm_nodes(proc.root, "00000000:c7:00.0") == frozenset()
    users = device_users.using_gpu(processes, 2, caps={}, drm=nodes)
    assert [process.pid for process in users] == [41, 43]


def test_at_most_eight_processes_are_named() -> None:
    assert device_users.name_users(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_real_process_is_found_with_its_open_device(tmp_path: pathlib.Path) -> None:
    (tmp_path / "dev").mkdir()
    # No simulated node has it: tests beside this one look for users of theirs in the same /proc.
    device = tmp_path / "dev/nvidia98"
    device.write_text("")
    script = "import os, sys; os.open(sys.argv[1], 0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", script, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        users = device_users.using_gpu(device_users.find_users(procfs.ROOT), 98)
        users_but_us = device_users.using_gpu(
            device_users.find_users(procfs.ROOT, ignore=(os.getpid(),)), 98
        )
        process.communicate()
    assert process.pid in [process.pid for process in users]
    assert process.pid not in [process.pid for process in users_but_us]


def test_hidden_processes_are_counted_with_the_capability_that_is_missing(
    proc: ProcTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (41, 42, 43):
        proc.add(pid, "/dev/nvidia0")
    proc.add(44, "/dev/nvidia0").joinpath("stat").write_text("44 (kworker) S 2 0 0 0 -1 2129984 0")
    scandir = os.scandir

    def refusing(path: pathlib.Path) -> object:
        if str(path).endswith(("42/fd", "43/fd", "44/fd")):
            raise PermissionError
        return scandir(path)

    assert device_users.describe_hidden(proc.root) == ""
    monkeypatch.setattr(os, "scandir", refusing)
    assert (
        device_users.describe_hidden(proc.root)
        == "not allowed to look into 2 processes (CAP_SYS_PTRACE)"
    )


def test_the_boot_id_is_read_and_without_a_proc_there_is_nothing(tmp_path: pathlib.Path) -> None:
    assert procfs.boot_id() == str(uuid.UUID(procfs.boot_id()))
    assert procfs.boot_id(tmp_path / "none") == ""
    assert device_users.find_users(tmp_path / "none") == ()
    assert device_users.capabilities(tmp_path / "none", 0) == {}
