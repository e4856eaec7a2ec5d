"""Our own pod's UID, from lists of mounts as runtimes and nodes of several kinds make them."""

import pathlib

import pytest

from mig_manager.adapters.host import procfs

UID = "0a947273-7214-4824-8411-875ebd7626e4"
OTHER = "fd698699-eabf-4c23-92ef-cf0bbdb78261"
PODS = "/var/lib/kubelet/pods"

CGROUP_1 = f"""\
1517 1500 0:25 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw,mode=755
1535 1517 0:29 /kubepods/burstable/pod{OTHER}/58a77afc /sys/fs/cgroup/cpuset ro - cgroup cgroup rw
"""
CGROUP_2 = "1517 1500 0:29 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw\n"
CONTAINERD = f"""\
1499 1100 0:317 / / rw,relatime master:501 - overlay overlay rw,lowerdir=/var/lib/containerd/1
1536 1499 8:1 {PODS}/{UID}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
1537 1519 8:1 {PODS}/{UID}/containers/agent/e3d5dec7 /dev/termination-log rw - ext4 /dev/sda1 rw
1540 1499 8:1 {PODS}/{UID}/volumes/kubernetes.io~configmap/config /etc/x ro - ext4 /dev/sda1 rw
"""
CRIO = f"""\
10303 9000 0:411 / / rw,relatime - overlay overlay rw,context="system_u:object_r:c1,c2",lowerdir=/a
10313 10303 0:25 /containers/storage/overlay/a8/hostname /etc/hostname rw - tmpfs tmpfs rw
10314 10303 252:4 /ostree/deploy/rhcos{PODS}/{UID}/etc-hosts /etc/hosts rw - xfs /dev/vda4 rw
10315 10304 252:4 /ostree/deploy/rhcos{PODS}/{UID}/containers/a/f3 /dev/termination-log rw - xfs
"""
OF_ITS_OWN = (
    f"2299 2235 253:0 /pods/{UID}/etc-hosts /etc/hosts rw,noatime - ext4 /dev/mapper/k rw\n"
)
KIND = f"574 564 254:1 /docker/volumes/kind/_data/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw\n"
ONLY_THE_LOG = f"9 8 8:1 {PODS}/{UID}/containers/agent/e3d5 /dev/termination-log rw - ext4 d rw\n"
HOSTS_ROOT = f"""\
90 80 8:1 / /host rw,relatime master:1 - ext4 /dev/sda1 rw
91 90 0:99 / /host{PODS}/{OTHER}/volumes/kubernetes.io~projected/token rw - tmpfs tmpfs rw
92 90 8:1 {PODS}/{OTHER}/etc-hosts /host/run/elsewhere/etc/hosts rw - ext4 /dev/sda1 rw
93 90 8:1 {PODS}/{OTHER}/volumes/x /host{PODS}/{OTHER}/volume-subpaths/x rw - ext4 /dev/sda1 rw
"""
SHARED_LOG = (
    f"99 88 8:1 {PODS}/{OTHER}/containers/x/1 /dev/termination-log rw - ext4 /dev/sda1 rw\n"
)
DOCKER = (
    "870 857 253:0 /var/lib/docker/containers/c0316c/hosts /etc/hosts rw - ext4 /dev/dm-0 rw\n"
)
STATIC = f"870 857 253:0 {PODS}/{'0a' * 16}/etc-hosts /etc/hosts rw - ext4 /dev/dm-0 rw\n"
HOST = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw
"""


def uid_from(text: str, folder: pathlib.Path, environ_value: str | None = None) -> str | None:
    file = folder / "mountinfo"
    file.write_text(text, encoding="utf-8")
    return procfs.own_pod_uid(environ_value, file)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(CONTAINERD + CGROUP_1, id="containerd, cgroup v1"),
        pytest.param(CONTAINERD + CGROUP_2, id="containerd, cgroup v2"),
        pytest.param(CRIO + CGROUP_1, id="CRI-O on OSTree, cgroup v1"),
        pytest.param(CRIO + CGROUP_2, id="CRI-O on OSTree, cgroup v2"),
        pytest.param(OF_ITS_OWN, id="kubelet's folder is a file system of its own"),
        pytest.param(KIND, id="kind"),
        pytest.param(ONLY_THE_LOG, id="no mount of the hosts file"),
        pytest.param(HOSTS_ROOT + CONTAINERD, id="the host's root before"),
        pytest.param(CONTAINERD + HOSTS_ROOT, id="the host's root behind"),
        pytest.param(CONTAINERD + SHARED_LOG, id="another pod's log in the host's /dev"),
        pytest.param("\n27\nnonsense here\n" + CONTAINERD, id="lines that mean nothing"),
    ],
)
def test_the_mounts_of_kubelet_show_the_pod(text: str, tmp_path: pathlib.Path) -> None:
    assert uid_from(text, tmp_path) == UID


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(HOST, id="a host"),
        pytest.param(HOST + HOSTS_ROOT, id="a host with other pods' mounts"),
        pytest.param(DOCKER, id="a container without a pod"),
        pytest.param(STATIC, id="a static pod, which the API knows by another UID"),
        pytest.param(CGROUP_1, id="control groups alone"),
    ],
)
def test_outside_a_pod_the_uid_is_empty(text: str, tmp_path: pathlib.Path) -> None:
    assert uid_from(text, tmp_path) is None


def test_the_downward_api_has_precedence_unless_empty(tmp_path: pathlib.Path) -> None:
    assert uid_from(CONTAINERD, tmp_path, OTHER) == OTHER
    assert [uid_from(CONTAINERD, tmp_path, nothing) for nothing in (None, "", " \n")] == [UID] * 3


def test_missing_mounts_raise_no_error(tmp_path: pathlib.Path) -> None:
    assert procfs.own_pod_uid(None, tmp_path / "missing") is None
    assert procfs.own_pod_uid(None, tmp_path) is None
