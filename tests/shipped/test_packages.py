"""The packages for bare metal: what is in them, and what their scripts leave in a root."""

import fcntl
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib

import pytest

import mig_manager
from tests.rigs import programs
from tests.rigs.shipped.unit_files import MANUAL, PLUGIN_MANUAL, UNITS
from tests.shipped import building, guest

pytestmark = pytest.mark.release

ROOT = pathlib.Path(__file__).parents[2]
ARCHS = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's name of a machine, and that of all others."""
SETTINGS = ["/etc/mig-manager/config.yaml", "/etc/mig-manager/mig-manager.env"]
LIBRARIES = "/usr/lib/mig-manager/lib/python3/site-packages/"
ZSH = {
    "deb": "/usr/share/zsh/vendor-completions/_mig-manager",
    "rpm": "/usr/share/zsh/site-functions/_mig-manager",
}
ACCEPTED = {
    "embedded-library": "wheels have their libraries",
    "maintainer-script-calls-systemctl": "debhelper's scripts would enable the units",
    "malformed-deb-archive": "dpkg has read zstd since 1.21.18; Debian's archive takes none",
    "no-manual-page": "kubectl alone runs kubectl_complete-mig",
    "unstripped-binary-or-object": "wheels stay as they were locked",
    "unusual-interpreter": "of libraries' modules, which are only imported",
}
"""What lintian finds, and why it stays."""


def minors() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classifiers = tomllib.loads(text)["project"]["classifiers"]
    return [each.rpartition(" ")[2] for each in classifiers if "Python :: 3." in each]


def deb(packages: pathlib.Path, arch: str = "amd64") -> pathlib.Path:
    return packages / f"mig-manager_{mig_manager.__version__}_{arch}.deb"


def rpm(packages: pathlib.Path, arch: str = "amd64") -> pathlib.Path:
    return packages / f"mig-manager-{mig_manager.__version__}-1.{ARCHS[arch]}.rpm"


def members(package: pathlib.Path) -> dict[str, tarfile.TarInfo]:
    """Return the files and links of a .deb, by their path on a machine."""
    command = [programs.path_or_skip("dpkg-deb"), "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,  # noqa: S603 - our own
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        return {each.name.removeprefix("."): each for each in archive if not each.isdir()}


def query(package: pathlib.Path, *options: str) -> str:
    return programs.output(programs.path_or_skip("rpm"), "-qp", *options, package)


@pytest.fixture(scope="module")
def unpacked_deb(packages: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("root")
    programs.output(programs.path_or_skip("dpkg-deb"), "-x", deb(packages), root)
    return root


# -- what is in them --------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_both_formats_have_the_same_files_links_and_rights(
    packages: pathlib.Path, arch: str
) -> None:
    listed = query(rpm(packages, arch), "--qf", "[%{FILEMODES:octal} %{FILENAMES}\n]")
    of_rpm = {
        path: int(mode, 8) & 0o777
        for mode, path in (line.split() for line in listed.splitlines())
        if stat.S_ISREG(int(mode, 8)) or stat.S_ISLNK(int(mode, 8))
    }
    of_deb = {path: member.mode for path, member in members(deb(packages, arch)).items()}

    assert of_rpm.pop(ZSH["rpm"]) == of_deb.pop(ZSH["deb"]) == 0o644
    assert of_rpm == of_deb


@pytest.mark.parametrize("arch", ARCHS)
def test_package_has_units_pages_and_extensions_for_each_python(
    packages: pathlib.Path, arch: str
) -> None:
    files = members(deb(packages, arch))
    extensions = {path for path in files if path.endswith(".so") and "abi3" not in path}
    modules = {path.partition(".cpython-")[0] for path in extensions}

    assert {
        *("/usr/bin/mig-manager", "/usr/bin/kubectl-mig", "/usr/bin/kubectl_complete-mig"),
        *(f"/usr/lib/systemd/system/{unit}" for unit in UNITS),
        *(f"/usr/share/man/man1/{page}.gz" for page in (*MANUAL, *PLUGIN_MANUAL)),
        *("/usr/lib/tmpfiles.d/mig-manager.conf", "/usr/share/doc/mig-manager/copyright"),
        "/usr/share/bash-completion/completions/mig-manager",
        "/usr/share/fish/vendor_completions.d/mig-manager.fish",
        *SETTINGS,
    } <= set(files)
    assert not [path for path in files if "/__pycache__/" in path]
    assert f"{LIBRARIES}aiohttp/__init__.py" not in files
    assert f"{LIBRARIES}grpc/_cython/cygrpc" in modules
    assert extensions == {
        f"{module}.cpython-{minor.replace('.', '')}-{ARCHS[arch]}-linux-gnu.so"
        for module in modules
        for minor in minors()
    }
    assert {member.uid for member in files.values()} == {0}


def test_both_formats_ask_for_one_of_the_pythons_and_keep_changed_settings(
    packages: pathlib.Path,
) -> None:
    control = programs.output("dpkg-deb", "--field", deb(packages), "Depends", "Version")
    conffiles = programs.output("dpkg-deb", "--info", deb(packages), "conffiles")
    flags = query(rpm(packages), "--qf", "[%{FILEFLAGS:fflags} %{FILENAMES}\n]")
    requires = query(rpm(packages), "--requires").splitlines()

    depends = f"Depends: {' | '.join(f'python{minor}' for minor in minors())}, libc6 (>= 2.28)"
    assert control.splitlines() == [depends, f"Version: {mig_manager.__version__}"]
    assert f"({' or '.join(f'python(abi) = {minor}' for minor in minors())})" in requires
    assert conffiles.split() == SETTINGS
    # c: a setting, n: noreplace
    assert re.findall(r"^cn (.*)$", flags, re.MULTILINE) == SETTINGS
    assert "digests OK" in programs.output("rpm", "--checksig", rpm(packages))


def test_a_second_build_gives_the_same_bytes(
    packages: pathlib.Path, wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    building.packages(wheel, tmp_path, ARCHS="amd64", TMPDIR=str(tmp_path))

    for package in (deb(packages), rpm(packages)):
        assert (tmp_path / package.name).read_bytes() == package.read_bytes(), package.name


def test_lintian_finds_nothing_else(packages: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = ("--allow-root", "--fail-on", "error,warning", "--suppress-tags", ",".join(ACCEPTED))

    building.run(programs.path_or_skip("lintian"), *options, deb(packages), cwd=tmp_path)


@pytest.mark.parametrize("minor", minors())
def test_the_libraries_run_under_each_python(
    unpacked_deb: pathlib.Path, tmp_path: pathlib.Path, minor: str
) -> None:
    pyenv = pathlib.Path.home() / ".pyenv" / "versions"
    candidates = [*pyenv.glob(f"{minor}.*/bin/python"), shutil.which(f"python{minor}")]
    interpreter = next((pathlib.Path(each) for each in candidates if each), None)
    if interpreter is None:
        pytest.skip(f"Python {minor} is not here")
    library = unpacked_deb / "usr" / "lib" / "mig-manager"
    python = library / "bin" / f"python{minor}"
    # As if this interpreter were the machine's, in /usr/bin.
    python.unlink()
    python.symlink_to(interpreter)
    settings = library / "pyvenv.cfg"
    home = re.sub("^home = .*", f"home = {interpreter.parent}", settings.read_text("utf-8"))
    settings.write_text(home, encoding="utf-8")
    imports = "import grpc, google._upb._message, starlette, uvicorn, yaml._yaml as c; "

    paths = programs.output(python, "-P", "-c", f"{imports}print(grpc.__file__, c.__file__)")
    output = programs.output(
        *(python, "-P", "-m", "mig_manager", "apply", "all-1g.6gb"),
        *("--simulate", "1xA30", "--simulate-state", tmp_path / "gpus.json"),
    )

    assert all(path.startswith(str(library)) for path in paths.split())
    assert "applied successfully" in output


@pytest.mark.parametrize(
    ("script", "reason"),
    [("preinstall", "upgrade"), ("preinstall", "2"), ("preremove", "remove"), ("preremove", "0")],
)
def test_package_waits_for_a_change_under_way(
    tmp_path: pathlib.Path, script: str, reason: str
) -> None:
    lock = tmp_path / "lock"
    lock.with_name("lock.owner").write_text("mig-manager apply all-1g.5gb")
    text = (ROOT / "release" / "native" / script).read_text(encoding="utf-8")
    code = text.replace("/run/mig-manager", str(tmp_path))
    code = code.replace("/usr/lib/mig-manager", str(tmp_path / "none"))
    log = tmp_path / "log"
    programs.write_script(tmp_path / "systemctl", f'echo "$1" >>{log}\necho active')
    settings = ("LOCK_WAIT_S=0", f"PATH={tmp_path}:{os.environ['PATH']}")
    line = ("env", *settings, "sh", "-c", code, "sh", reason)
    log.touch()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = programs.run(*line)
        calls = log.read_text(encoding="utf-8").split()

    assert refused.returncode == 1
    assert refused.stderr.endswith("at work on the GPUs: mig-manager apply all-1g.5gb\n")
    assert calls == (["is-active", "stop", "start"] if script == "preremove" else [])
    assert programs.run(*line).returncode == 0
    assert ("disable" in log.read_text(encoding="utf-8")) == (script == "preremove")


@pytest.mark.parametrize("reason", ["remove", "upgrade", "0"])
def test_a_package_whose_library_is_gone_can_be_removed(
    tmp_path: pathlib.Path, reason: str
) -> None:
    script = (ROOT / "release" / "native" / "preremove").read_text(encoding="utf-8")
    code = script.replace("/usr/lib/mig-manager", str(tmp_path / "none"))
    programs.write_script(tmp_path / "systemctl", "")

    programs.output("sh", "-c", code, "sh", reason, PATH=f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize("reason", ["configure", "triggered", "abort-upgrade"])
def test_package_has_bytecode_after_every_end_of_an_upgrade(
    tmp_path: pathlib.Path, reason: str
) -> None:
    module = tmp_path / "lib" / "python3" / "module.py"
    for folder in (module.parent, tmp_path / "bin"):
        folder.mkdir(parents=True)
    module.touch()
    (tmp_path / "bin" / "python3.11").symlink_to(sys.executable)
    script = (ROOT / "release" / "native" / "postinstall").read_text(encoding="utf-8")
    code = script.replace("/usr/lib/mig-manager", str(tmp_path))
    code = code.replace("/run/systemd/system", str(tmp_path / "none"))

    programs.output("sh", "-c", code, "sh", reason)

    assert [*module.parent.glob("__pycache__/module.*.pyc")]


# -- the .rpm in a root -----------------------------------------------------------------------


def test_rpm_keeps_changed_settings_when_upgraded_and_erased(
    packages: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """In a Debian, because no Fedora is at hand: its scripts run, its dependencies are not met."""
    if missing := guest.missing():
        pytest.skip(missing)
    package, root = rpm(packages), tmp_path / "root"
    manage = (programs.path_or_skip("rpm"), "--root", root, "--dbpath", "/var/lib/rpm")
    guest.unpack("bookworm", root)
    try:
        programs.output(*manage, "--initdb")
        before = set(root.rglob("*"))
        programs.output(*manage, "--install", "--nodeps", package)
        changed = root / SETTINGS[1].removeprefix("/")
        changed.write_text("NODE_NAME=mine\n", encoding="utf-8")

        programs.output(*manage, "--upgrade", "--nodeps", "--force", package)

        assert changed.read_text(encoding="utf-8") == "NODE_NAME=mine\n"
        assert [*root.glob("usr/lib/mig-manager/lib/python3/site-packages/yaml/__pycache__/*")]
        program = ("chroot", root, "mig-manager")
        assert mig_manager.__version__ in programs.output(*program, "version")

        # A newer Debian, whose Python has no libraries in this package.
        (root / "usr/bin/python3.11").rename(root / "usr/bin/python3.14")
        refused = programs.run(*program, "version")
        assert refused.returncode == 1
        assert "none of these is installed: /usr/lib/mig-manager/bin/python3.11 " in refused.stderr
        (root / "usr/bin/python3.14").rename(root / "usr/bin/python3.11")

        programs.output(*manage, "--erase", "mig-manager")
        # The folders that all programs share are of Fedora's package "filesystem".
        shared = {path for path in root.glob("usr/share/**") if "mig" not in path.name}
        remaining = set(root.rglob("*")) - before - shared
        assert remaining == {changed.parent, changed.with_name("mig-manager.env.rpmsave")}
    finally:
        shutil.rmtree(root)
