"""What krew gets: a manifest by its rules, and an archive whose one program needs Python alone.

The rules are those of krew's own check (``internal/index/validation/validate.go``,
``ValidatePlugin``), which runs before anything is installed.
"""

import ast
import hashlib
import io
import pathlib
import re
import runpy
import sys
import tarfile
import zipfile
from typing import Any

import pytest
import yaml

import mig_manager
from testkit import apiserver
from tests.rigs import api_objects, programs
from tests.rigs.shell import plugin_rig

ROOT = pathlib.Path(__file__).parents[2]
PACK = ROOT / "release" / "krew" / "pack.py"
URL = "https://example.com/owner/fork"
MANIFEST_KEYS = {
    "version", "homepage", "shortDescription", "description", "caveats", "platforms",
}  # fmt: skip
PLATFORM_KEYS = {"selector", "uri", "sha256", "bin", "files"}


def pack(folder: pathlib.Path) -> pathlib.Path:
    programs.output(sys.executable, PACK, folder, SOURCE_DATE_EPOCH="1700000000", PROJECT_URL=URL)
    return folder


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return pack(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def archive(package_folder: pathlib.Path) -> pathlib.Path:
    (path,) = package_folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def manifest(package_folder: pathlib.Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (package_folder / "mig.yaml").read_text(encoding="utf-8")
    )
    return content


@pytest.mark.slow
def test_the_manifest_passes_krews_own_check(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert manifest["kind"] == "Plugin"
    assert manifest["metadata"] == {"name": "mig"}
    assert (ROOT / "release" / "krew" / f"{manifest['metadata']['name']}.yaml.template").exists()
    spec = manifest["spec"]
    assert spec.keys() == MANIFEST_KEYS
    assert spec["version"] == f"v{mig_manager.__version__}"
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert 0 < len(spec["shortDescription"]) <= 50
    assert "\n" not in spec["shortDescription"]
    (platform,) = spec["platforms"]
    assert platform.keys() == PLATFORM_KEYS
    assert re.fullmatch(r"[a-f0-9]{64}", platform["sha256"])
    assert platform["bin"] == "kubectl-mig"
    assert all(each["from"] and each["to"] for each in platform["files"])
    (expression,) = platform["selector"]["matchExpressions"]
    assert expression == {"key": "os", "operator": "In", "values": ["linux", "darwin"]}


@pytest.mark.slow
def test_manifest_names_an_archive_that_is_reproducible(
    manifest: dict[str, Any], archive: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    again = pack(tmp_path)
    (platform,) = manifest["spec"]["platforms"]

    assert platform["uri"] == f"{URL}/releases/download/v{mig_manager.__version__}/{archive.name}"
    assert manifest["spec"]["homepage"] == URL
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    with tarfile.open(archive) as opened:
        modes = {member.name: member.mode for member in opened}
    assert {each["from"] for each in platform["files"]} == set(modes)
    assert modes["kubectl-mig"] == 0o755
    for each in archive.parent.iterdir():
        assert (again / each.name).read_bytes() == each.read_bytes()


@pytest.mark.slow
def test_the_archive_has_only_the_modules_that_the_plugin_needs(archive: pathlib.Path) -> None:
    with tarfile.open(archive) as opened:
        program = opened.extractfile("kubectl-mig")
        assert program
        names = zipfile.ZipFile(io.BytesIO(program.read())).namelist()

    assert {name.partition("/")[0] for name in names} == {"__main__.py", "mig_manager", "yaml"}
    assert not [name for name in names if name.startswith("mig_manager/sandbox/")]
    assert {name for name in names if name.startswith("mig_manager/catalogue/")} == {
        f"mig_manager/catalogue/{name}"
        for name in ("__init__.py", "hardware.json", "hardware.py", "product_table.py")
    }
    assert not [name for name in names if "nvml" in name or name.endswith((".so", ".pyc"))]


def test_a_python_that_is_too_old_can_read_why() -> None:
    ast.parse(runpy.run_path(str(PACK))["MAIN"], feature_version=(3, 4))


@pytest.mark.slow
def test_kubectl_runs_what_krew_installs(
    archive: pathlib.Path, manifest: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    # A folder on the PATH as krew leaves it, and a Python without any package.
    store, folder = tmp_path / "store", tmp_path / "bin"
    programs.write_script(folder / "python3", f'exec "{sys.executable}" -S "$@"')
    programs.unpack(archive, store)
    for name in ("kubectl-mig", "kubectl_complete-mig"):
        (folder / name).symlink_to(store / manifest["spec"]["platforms"][0]["bin"])

    with apiserver.serve() as server:
        gpus = plugin_rig.gpus_with("1xA100-SXM4-40GB", "all-balanced")
        server.store.create(plugin_rig.node("n1", gpus=gpus))
        product = {"nvidia.com/gpu.product": "NVIDIA-A30", "nvidia.com/gpu.count": "1"}
        server.store.create(plugin_rig.node("n2", labels=product))
        server.store.create(api_objects.a_config_map(plugin_rig.CONFIG))
        user = plugin_rig.kubectl_user(server, tmp_path, plugins=folder)

        assert user.run_kubectl_mig("version").out == f"kubectl-mig {mig_manager.__version__}\n"
        status = user.run_kubectl_mig("status", "n1")
        plan = user.run_kubectl_mig("plan", "all-disabled")
        completed = user.kubectl("__complete", "mig", "status", "n")

    assert (status.status, status.err) == (0, "")
    assert "3g.20gb" in status.out
    assert (plan.status, plan.err) == (0, "")
    assert "1 GPU reset" in plan.out
    assert completed.out.splitlines() == ["n1", "n2", ":4"]
