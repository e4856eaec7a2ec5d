"""The NVML library: where it is found, and its answers as errors of ours."""

import pathlib
from collections.abc import Iterator

import pynvml
import pytest

from mig_manager import errors
from mig_manager.adapters.nvml import library


@pytest.fixture
def _binding_restored() -> Iterator[None]:
    library = pynvml.nvmlLib
    yield
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(pynvml.NVML_ERROR_DRIVER_NOT_LOADED, errors.Reason.DRIVER_NOT_LOADED),
        pytest.param(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, errors.Reason.DRIVER_NOT_LOADED),
        pytest.param(pynvml.NVML_ERROR_UNINITIALIZED, errors.Reason.DRIVER_NOT_LOADED),
        pytest.param(pynvml.NVML_ERROR_GPU_IS_LOST, errors.Reason.GPU_LOST),
        pytest.param(pynvml.NVML_ERROR_IN_USE, errors.Reason.IN_USE),
        pytest.param(pynvml.NVML_ERROR_TIMEOUT, errors.Reason.NVML_TIMEOUT),
        pytest.param(pynvml.NVML_ERROR_NO_PERMISSION, errors.Reason.NO_PERMISSION),
        pytest.param(31337, errors.Reason.NVML_ERROR, id="from a newer driver"),
    ],
)
def test_an_answer_means_what_a_person_must_do(code: int, reason: errors.Reason) -> None:
    error = library.from_code(code, operation="nvmlX")
    assert error.reason is reason
    assert error.code == code
    assert error.operation == "nvmlX"
    assert error.message.startswith("nvmlX answered ")


def test_an_error_is_raised_with_the_function_that_gave_it() -> None:
    def refuse(_: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    with pytest.raises(errors.HardwareError, match="refuse answered 'Not Supported'") as caught:
        library.call(refuse, 1)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


def test_a_function_that_an_old_library_lacks_is_not_supported() -> None:
    # The binding raises this one outside its own hierarchy of errors.
    def old() -> None:
        raise pynvml.NVMLLibraryMismatchError("use a versioned function")

    with pytest.raises(errors.HardwareError, match="Function Not Found") as caught:
        library.call(old)
    assert caught.value.reason is errors.Reason.NOT_SUPPORTED


def test_a_name_that_is_no_utf_8_is_an_error_of_ours() -> None:
    def nvmlSystemGetProcessName(name: bytes) -> str:  # noqa: N802 - as NVML has it
        return name.decode()

    with pytest.raises(errors.HardwareError, match="nvmlSystemGetProcessName") as caught:
        library.call(nvmlSystemGetProcessName, b"/opt/caf\xe9")
    assert caught.value.reason is errors.Reason.NVML_ERROR


def test_an_expected_answer_is_none_and_another_is_an_error() -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    assert library.call_unless({pynvml.NVML_ERROR_NOT_FOUND}, refuse) is None
    with pytest.raises(errors.HardwareError):
        library.call_unless(library.UNOFFERED, refuse)


def test_an_error_names_the_gpu_and_the_operation() -> None:
    error = library.from_code(pynvml.NVML_ERROR_NOT_FOUND, operation="nvmlX")
    placed = library.about("GPU 0 (GPU-1)", error, doing="cannot switch MIG mode")
    assert placed.message == ("GPU 0 (GPU-1): cannot switch MIG mode: nvmlX answered 'Not Found'")
    assert placed.gpu == "GPU 0 (GPU-1)"
    assert (placed.reason, placed.operation, placed.code) == (
        error.reason,
        error.operation,
        error.code,
    )


@pytest.mark.usefixtures("_binding_restored")
def test_a_library_that_cannot_be_loaded_means_that_there_is_no_driver() -> None:
    with (
        pytest.raises(errors.HardwareError, match="/does/not/exist") as caught,
        library.session("/does/not/exist.so"),
    ):
        pass
    assert caught.value.reason is errors.Reason.DRIVER_NOT_LOADED


@pytest.mark.usefixtures("_binding_restored")
def test_a_library_that_is_not_nvml_is_refused_at_the_first_call() -> None:
    with (
        pytest.raises(errors.HardwareError, match="Function Not Found") as caught,
        library.session("libc.so.6"),
    ):
        pass
    assert caught.value.reason is errors.Reason.NOT_SUPPORTED


@pytest.mark.usefixtures("_binding_restored")
def test_another_library_is_not_answered_for_by_the_one_before() -> None:
    pynvml._nvmlGetFunctionPointer_cache["nvmlInitWithFlags"] = lambda _: 0
    with pytest.raises(errors.HardwareError), library.session("libc.so.6"):
        pass


def put(root: pathlib.Path, folder: str) -> pathlib.Path:
    file = root / folder / "libnvidia-ml.so.1"
    file.parent.mkdir(parents=True)
    file.touch()
    return file


@pytest.mark.parametrize("is_known", [False, True])
def test_the_library_is_found_below_the_first_root_unless_the_loader_finds_it(
    *, is_known: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_is_loadable", lambda: is_known)
    put(tmp_path / "second", "usr/lib64")
    wanted = put(tmp_path / "first", "usr/lib/x86_64-linux-gnu")
    roots = (str(tmp_path / "none"), str(tmp_path / "first"), str(tmp_path / "second"))

    assert library.find(roots) == (None if is_known else str(wanted))


@pytest.mark.parametrize("folder", ["usr", "usr/lib64/libnvidia-ml.so.1"])
def test_where_no_root_has_it_the_loader_says_what_is_wrong(
    folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_is_loadable", lambda: False)
    (tmp_path / folder).mkdir(parents=True)

    assert library.find([str(tmp_path)]) is None


def test_without_a_root_the_loader_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(library, "_is_loadable")

    assert library.find([]) is None
