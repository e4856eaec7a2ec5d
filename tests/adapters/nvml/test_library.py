"""The NVML library: where it is found, and its answers as errors of ours."""

import pathlib
from collections.abc import Iterator

import pynvml
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import library
from mig_manager.sandbox.driver import states
from tests.rigs.node.nvml_rig import ON, NvmlRig


@pytest.fixture
def _binding_restored() -> Iterator[None]:
    loaded = pynvml.nvmlLib
    yield
    pynvml.nvmlLib = loaded
    pynvml._nvmlGetFunctionPointer_cache.clear()


def test_an_answer_of_a_newer_driver_is_an_nvml_error() -> None:
    error = library.from_code(31337, operation="nvmlX")
    assert (error.reason, error.code) == (reasons.Reason.NVML_ERROR, 31337)
    assert error.operation == "nvmlX"
    assert error.message.startswith("nvmlX answered ")


@pytest.mark.parametrize(
    ("raised", "answer", "reason"),
    [
        (pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), "Not Supported", "NotSupported"),
        # Outside of the binding's own hierarchy of errors.
        (pynvml.NVMLLibraryMismatchError("old"), "Function Not Found", "NotSupported"),
        (UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "why"), "Unknown Error", "NvmlError"),
    ],
)
def test_bindings_exception_becomes_an_error_with_its_function(
    raised: Exception, answer: str, reason: str
) -> None:
    def refuse(_: int) -> None:
        raise raised

    with pytest.raises(errors.HardwareError, match=f"refuse answered '{answer}'") as caught:
        library.call(refuse, 1)
    assert caught.value.reason is reasons.Reason(reason)
    assert caught.value.__cause__ is raised


def test_a_driver_without_any_gpu_is_waited_for(rig: NvmlRig) -> None:
    rig.fault("nvmlInit*", code=states.Code.GPU_NOT_FOUND)
    with pytest.raises(errors.HardwareError, match="no GPU is bound to the driver") as caught:
        rig.gpus.observe()
    assert caught.value.reason is reasons.Reason.DRIVER_NOT_LOADED
    assert len(rig.gpus.observe()) == 1


@pytest.mark.usefixtures("_binding_restored")
def test_a_session_that_cannot_be_closed_is_a_warning(
    rig: NvmlRig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rig.observe()
    rig.fault("nvmlShutdown", code=states.Code.UNKNOWN)
    assert rig.enable().current_mode is ON is not before.current_mode
    assert "not closed: nvmlShutdown answered 'Unknown Error'" in capsys.readouterr().err


@pytest.mark.usefixtures("_binding_restored")
def test_library_that_is_not_nvml_is_refused_even_after_another() -> None:
    pynvml._nvmlGetFunctionPointer_cache["nvmlInitWithFlags"] = lambda _: 0
    with (
        pytest.raises(errors.HardwareError, match="Function Not Found") as caught,
        library.session("libc.so.6"),
    ):
        pass
    assert caught.value.reason is reasons.Reason.NOT_SUPPORTED


def put(root: pathlib.Path, folder: str) -> pathlib.Path:
    file = root / folder / "libnvidia-ml.so.1"
    file.parent.mkdir(parents=True)
    file.touch()
    return file


@pytest.mark.parametrize("is_known", [False, True])
def test_library_is_found_below_the_first_root_or_by_the_loader(
    *, is_known: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_is_loadable", lambda: is_known)
    put(tmp_path / "second", "usr/lib64")
    expected = put(tmp_path / "first", "usr/lib/x86_64-linux-gnu")
    roots = (str(tmp_path / "none"), str(tmp_path / "first"), str(tmp_path / "second"))

    assert library.find(roots) == (None if is_known else str(expected))


@pytest.mark.parametrize("folder", ["usr", "usr/lib64/libnvidia-ml.so.1"])
def test_a_library_in_no_root_is_reported_with_the_loaders_message(
    folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_is_loadable", lambda: False)
    (tmp_path / folder).mkdir(parents=True)

    assert library.find([str(tmp_path)]) is None


def test_without_a_root_the_loader_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(library, "_is_loadable")

    assert library.find([]) is None
