"""An embedded API server and a client of it; a simulated node with NVML open on it."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from mig_manager.adapters.kubernetes import api
from testkit import apiserver
from tests.rigs.cluster import apirig
from tests.rigs.driver import nvidia_functions  # noqa: F401 - registers what NVIDIA's programs call
from tests.rigs.node import nvml_rig


@pytest.fixture
def ask() -> Iterator[apirig.Client]:
    with apirig.serving() as client:
        yield client


@pytest.fixture
def server(ask: apirig.Client) -> apiserver.ApiServer:
    return ask.server


@pytest.fixture
def kube(server: apiserver.ApiServer) -> Iterator[api.KubeApi]:
    with apirig.quick_client(server) as client:
        yield client


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[nvml_rig.Start]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(
            nvml_rig.nvml_session(tmp_path / "node.json", *args, **options)
        )


@pytest.fixture
def device(start: nvml_rig.Start) -> Any:
    """Boot a node with one GPU and give its handle, with MIG on."""
    start()
    return nvml_rig.gpu_with_mig()
