"""The process that uses a MIG device: its context, why it has none, and its end."""

import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.adapters import cuda
from tests.rigs import waiting
from tests.rigs.driver import c_library
from tests.rigs.shell import shell_node


@pytest.fixture
def node(tmp_path: pathlib.Path) -> shell_node.ShellNode:
    return shell_node.ShellNode(tmp_path, "1xA30")


@pytest.fixture
def nvml(node: shell_node.ShellNode) -> Iterator[pathlib.Path]:
    """Serve the library of a node's driver."""
    with c_library.serve(node.path.with_name("lib"), node.path) as library:
        yield library


def test_a_context_keeps_its_gpu_in_use_until_the_body_ends(
    node: shell_node.ShellNode, nvml: pathlib.Path
) -> None:
    c_library.add_cuda(nvml)
    line = cuda.command(library_path=str(nvml), driver_roots=())
    uuid = node.state.boards[0].uuid

    with cuda.using(line, uuid) as problem:
        (client,) = node.state.read().clients

    assert (problem, client.gpu_uuid) == ("", uuid)
    waiting.until(lambda: node.state.read().clients == (), "the end of the client")


def test_a_missing_cuda_library_means_no_context(nvml: pathlib.Path) -> None:
    line = cuda.command(library_path=str(nvml), driver_roots=())

    with cuda.using(line, "MIG-0") as problem:
        assert problem == "no CUDA driver library"


def test_the_function_that_fails_is_named_with_its_error(nvml: pathlib.Path) -> None:
    c_library.add_cuda(nvml)
    line = cuda.command(library_path=str(nvml), driver_roots=())

    with cuda.using(line, "MIG-0") as problem:
        assert problem == "cuCtxCreate_v2 answered 100"


@pytest.mark.parametrize("line", [("/nonexistent",), ("false",), ("echo", "text")])
def test_a_process_that_gives_no_answer_raises_no_error(line: tuple[str, ...]) -> None:
    with cuda.using(line, "MIG-0") as problem:
        assert problem == "CUDA crashed"
