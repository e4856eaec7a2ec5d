"""A simulated NVML and an embedded API server for the tests of the adapters."""

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.adapters.kubernetes import api
from testkit import apiserver
from tests.rigs.cluster import apirig, kubelet_rig
from tests.rigs.host import proc_tree, processes
from tests.rigs.node import nvml_rig


@pytest.fixture
def boot(tmp_path: pathlib.Path) -> Iterator[nvml_rig.Boot]:
    """Return what starts a simulated node for the rest of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(
            nvml_rig.booted(tmp_path / "state", *args, **kwargs)
        )


@pytest.fixture
def rig(boot: nvml_rig.Boot) -> nvml_rig.NvmlRig:
    """Return a simulated node with one A100."""
    return boot()


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        yield running


@pytest.fixture
def kube(server: apiserver.ApiServer) -> Iterator[api.KubeApi]:
    with apirig.quick_client(server) as client:
        yield client


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> proc_tree.ProcTree:
    return proc_tree.ProcTree(tmp_path / "proc")


@pytest.fixture
def kubelet() -> Iterator[kubelet_rig.GrpcKubelet]:
    with kubelet_rig.a_kubelet() as running:
        yield running


@pytest.fixture
def leaves_nothing_behind() -> Iterator[None]:
    """Check that the test leaves no descriptor, child or thread."""
    with processes.leaving_nothing_behind():
        yield
