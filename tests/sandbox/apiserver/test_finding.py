"""The library and programs of a driver, found where distributions and installers put them."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from mig_manager.adapters.host import nvml_libraries
from mig_manager.sandbox.driver import state_file, states
from testkit import nvidia_smi, nvml_faults
from tests.rigs.driver import c_library

_MISMATCH = 18  # ``NVML_ERROR_LIB_RM_VERSION_MISMATCH``
_LAYOUT = """
version: v1
mig-configs:
  whole:
  - {devices: all, mig-enabled: true, mig-devices: {7g.40gb: 1}}
"""


class FoundMachine:
    """Runs commands as processes of their own, whose loader knows no NVML library."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.environ = c_library.environ(folder)

    def __call__(
        self, *argv: str, stdin: str = "", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-m", "mig_manager", *argv],
            env={**os.environ, **self.environ, **environ},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        return done


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> FoundMachine:
    return FoundMachine(tmp_path)


def node(folder: pathlib.Path, **options: object) -> pathlib.Path:
    """Return the state of a new node with one GPU."""
    path = folder / "node.json"
    state_file.SharedState(path).create("a100-sxm4-40gb", options=states.Options(**options))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    "folder",
    [
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/aarch64-linux-gnu/nvidia/current",
        "home/kubernetes/bin/nvidia/lib64",
        "usr/local/glibc/usr/lib",
        "run/opengl-driver/lib",
    ],
)
def test_the_library_is_found_where_distributions_put_it(
    folder: str, tmp_path: pathlib.Path
) -> None:
    file = c_library.build(tmp_path / folder)

    assert list(nvml_libraries.find(tmp_path)) == [file]


@pytest.mark.slow
def test_links_of_debians_alternatives_lead_to_paths_below_the_driver_root(
    shell: FoundMachine, tmp_path: pathlib.Path
) -> None:
    root = tmp_path / "root"
    usual = root / "usr/lib/x86_64-linux-gnu" / c_library.NAME
    alternative = root / "etc/alternatives/nvidia--libnvidia-ml.so.1"
    usual.parent.mkdir(parents=True)
    alternative.parent.mkdir(parents=True)
    usual.symlink_to("/etc/alternatives/nvidia--libnvidia-ml.so.1")
    alternative.symlink_to(f"/opt/driver-550/{c_library.NAME}")
    with c_library.serve(root / "opt/driver-550", node(tmp_path)):
        answer = shell("apply", "whole", "-f", "-", "--driver-root", str(root), stdin=_LAYOUT)

    assert answer.returncode == 0, answer.stderr


def test_the_loaders_cache_of_a_driver_root_is_searched(
    shell: FoundMachine, tmp_path: pathlib.Path
) -> None:
    root = tmp_path / "root"
    cache = root / "etc/ld.so.cache"
    cache.parent.mkdir(parents=True)
    with c_library.serve(root / "opt/driver", node(tmp_path)) as file:
        # ldconfig writes the folder as it sees it; below the root it is a link to the real one.
        as_cached = root / file.parent.relative_to("/")
        as_cached.parent.mkdir(parents=True)
        as_cached.symlink_to("/opt/driver")
        (tmp_path / "conf").write_text(f"{file.parent}\n")
        c_library.run("/sbin/ldconfig", "-X", "-C", str(cache), "-f", str(tmp_path / "conf"))
        answer = shell("status", DRIVER_ROOT_CTR_PATH=str(root))

    assert answer.returncode == 0, answer.stderr
    assert list(nvml_libraries.find(root)) == [root / "opt/driver" / file.name]
    # The flags of an entry: the library of an architecture, or of 32-bit x86.
    cache.write_bytes(re.sub(rb"\x03[^\0]\0\0", b"\x03\0\0\0", cache.read_bytes()))
    assert list(nvml_libraries.find(root)) == []


@pytest.mark.slow
def test_doctor_finds_the_library_by_the_loaders_variables(
    shell: FoundMachine, tmp_path: pathlib.Path
) -> None:
    with c_library.serve(tmp_path / "library", node(tmp_path)) as file:
        done = shell("doctor", "-o", "json", LD_LIBRARY_PATH=str(file.parent))

    results = {each["check"]: each["result"] for each in json.loads(done.stdout)["findings"]}
    assert (results["driver"], results["gpus"]) == ("ok", "ok")


@pytest.mark.slow
def test_mismatched_loader_library_gives_way_to_the_driver_roots(
    shell: FoundMachine, tmp_path: pathlib.Path
) -> None:
    stale, current = node(tmp_path / "stale"), node(tmp_path / "current")
    # The library finds a kernel module of another version than its own.
    mismatch = nvml_faults.Fault(function="nvmlInit*", count=None, code=_MISMATCH)
    nvml_faults.SharedState(stale).add_fault(mismatch)
    root = tmp_path / "root"
    with c_library.serve(tmp_path / "injected", stale) as file:
        environ = {"LD_LIBRARY_PATH": str(file.parent), "DRIVER_ROOT_CTR_PATH": str(root)}
        alone = shell("status", **environ)
        with c_library.serve(root / "usr/lib64", current):
            both = shell("status", "-o", "json", **environ)

    assert alone.returncode == 1
    assert "no library has the loaded driver's version" in alone.stderr
    assert "remedy: Restart the pod" in alone.stderr
    assert both.returncode == 0, both.stderr
    assert len(json.loads(both.stdout)["gpus"]) == 1


@pytest.mark.slow
def test_nvidia_smi_is_found_on_the_path_where_no_driver_root_has_it(
    shell: FoundMachine, tmp_path: pathlib.Path
) -> None:
    state = node(tmp_path, resets_itself=False)
    nvidia_smi.install(tmp_path / "conda/bin", state)
    with c_library.serve(tmp_path / "host/usr/lib64", state):
        answer = shell(
            "apply", "whole", "-f", "-", stdin=_LAYOUT, PATH=f"nowhere:{tmp_path}/conda/bin"
        )

    assert answer.returncode == 0, answer.stderr
    assert [gpu.attachments for gpu in nvml_faults.SharedState(state).read().gpus] == [1]
