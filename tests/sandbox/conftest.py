"""An embedded API server and a client of it; a simulated node with NVML open on it."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from testkit import apiserver
from tests.sandbox import apirig, nvml_rig


@pytest.fixture
def ask() -> Iterator[apirig.Client]:
    with apirig.serving() as client:
        yield client


@pytest.fixture
def server(ask: apirig.Client) -> apiserver.ApiServer:
    return ask.server


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[nvml_rig.Start]:
    with nvml_rig.node(tmp_path) as boot:
        yield boot


@pytest.fixture
def device(start: nvml_rig.Start) -> Any:
    """Boot a node with one GPU and give its handle, with MIG on."""
    start()
    return nvml_rig.enabled()
