"""Device nodes and CDI specs after a change: up to date, left out with a reason, or as before."""

import dataclasses
import os
import pathlib
import stat

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.adapters.host import cdi, device_nodes, programs
from tests.adapters.host import root_filesystems
from tests.rigs.host import privileges, proc_tree
from tests.rigs.programs import write_script

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="chroot(2) is for root")

ROOT = pathlib.Path("/")


def spec(*names: str, kind: str = "nvidia.com/gpu") -> str:
    """Return a CDI spec as NVIDIA's tool writes it."""
    lines = ["---", "cdiVersion: 0.5.0", f"kind: {kind}", "devices:"]
    for name in names:
        lines += [f'    - name: "{name}"', "      containerEdits:", "        deviceNodes:"]
        lines += ["            - path: /dev/nvidia0"]
    return "\n".join([*lines, ""])


class CdiHost:
    """A host below a folder, with a stand-in for ``nvidia-ctk`` that notes how it was run."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root_filesystems.filesystem(root)
        for folder in ("run/cdi", "etc/cdi", "etc/nvidia-container-toolkit", "var"):
            (root / folder).mkdir(parents=True)
        # As it is on every host today; followed from outside it would lead elsewhere.
        (root / "var/run").symlink_to("/run")
        self.spec_in_run = root / "run/cdi/nvidia.yaml"
        self.spec_in_etc = root / "etc/cdi/nvidia.yaml"
        self.management = root / "run/cdi/management.nvidia.com-gpu.yaml"
        self.roots = root_filesystems.host_roots(root)

    def install(self, then: str = "", *, output: str = spec("0", "MIG-1", "all")) -> None:
        """Have a tool that says this, and then does what else it shall."""
        (self.root / "output").write_text(output)
        write_script(
            self.root / "usr/bin/nvidia-ctk",
            'echo "$*" >> /runs; env >> /variables\n'
            'if [ "$2" = transform ]; then cat; echo "# $4 $5"; exit; fi\n'
            f"cat /output\n{then}",
        )

    def runs(self) -> list[str]:
        path = self.root / "runs"
        return path.read_text().splitlines() if path.exists() else []

    def specs(self, *, makes_management: bool = False, timeout_s: float = 60.0) -> str:
        """Refresh the specs; return what was logged."""
        with structlog.testing.capture_logs() as logs:
            cdi.refresh(
                self.roots,
                makes_management=makes_management,
                timeout_s=timeout_s,
                own_root=self.root / "nowhere",
            )
        return "; ".join(
            f"{each['event']} {each.get('what') or each.get('path')} {each.get('why', '')}".strip()
            for each in logs
        ).replace(f"{self.root}/", "/")


@pytest.fixture
def host(tmp_path: pathlib.Path) -> CdiHost:
    return CdiHost(tmp_path / "host")


@needs_root
def test_an_existing_spec_is_regenerated_and_written_only_if_it_changed(host: CdiHost) -> None:
    host.spec_in_run.write_text(spec("0"))
    host.install()

    assert host.specs() == "cdi_spec_written /run/cdi/nvidia.yaml"

    assert host.spec_in_run.read_text() == spec("0", "MIG-1", "all")
    assert stat.S_IMODE(host.spec_in_run.stat().st_mode) == 0o644
    assert [path.name for path in host.spec_in_run.parent.iterdir()] == ["nvidia.yaml"]
    before = host.spec_in_run.stat().st_ino
    assert host.specs() == ""
    assert host.spec_in_run.stat().st_ino == before


def test_the_tool_runs_only_if_it_is_installed_and_a_spec_exists(host: CdiHost) -> None:
    host.install()
    assert host.specs() == ""
    assert host.runs() == []

    (host.root / "usr/bin/nvidia-ctk").unlink()
    host.spec_in_run.write_text("mine")

    assert host.specs() == (
        "device_files_skipped /run/cdi/nvidia.yaml nvidia-ctk is not found on the host"
    )

    assert host.spec_in_run.read_text() == "mine"


@needs_root
def test_a_spec_that_the_hosts_service_could_not_write_is_created(host: CdiHost) -> None:
    host.install()
    unit = host.root / "usr/lib/systemd/system/nvidia-cdi-refresh.service"
    wants = host.root / "etc/systemd/system/multi-user.target.wants"
    for folder in (unit.parent, wants):
        folder.mkdir(parents=True)
    unit.touch()
    assert host.specs() == ""

    (wants / unit.name).symlink_to("/usr/lib/systemd/system/nvidia-cdi-refresh.service")

    assert host.specs() == "cdi_spec_written /run/cdi/nvidia.yaml"
    assert host.runs() == ["cdi generate"]
    assert host.spec_in_run.read_text() == spec("0", "MIG-1", "all")


@needs_root
@pytest.mark.parametrize(
    ("before", "options"),
    [
        (spec("0", "1:0", "all"), " --device-name-strategy=index"),
        (
            spec("0", "GPU-1", "MIG-2", "all"),
            " --device-name-strategy=index --device-name-strategy=uuid",
        ),
        (spec("gpu0", "mig1:0"), " --device-name-strategy=type-index"),
        (
            spec("0", kind="example.com/card"),
            " --vendor=example.com --class=card --device-name-strategy=index",
        ),
        (spec("all"), ""),
        ("not yet written", ""),
    ],
    ids=["by index", "by index and UUID", "by type and index", "another kind", "all", "none"],
)
def test_devices_keep_their_naming_strategy_below_any_driver_root(
    host: CdiHost, before: str, options: str
) -> None:
    host.spec_in_etc.write_text(before)
    host.install()
    host.specs()
    host.roots = dataclasses.replace(host.roots, driver=pathlib.Path("/run/nvidia/driver"))
    host.spec_in_etc.write_text(before)
    host.specs()

    assert host.runs() == [
        f"cdi generate{options}",
        f"cdi generate{options} --driver-root=/run/nvidia/driver --dev-root=/",
    ]


@needs_root
def test_the_variables_of_the_hosts_own_refresh_are_honoured(host: CdiHost) -> None:
    other = host.root / "run/cdi/other.yaml"
    other.write_text(spec("0"))
    host.spec_in_run.write_text("not the one")
    (host.root / "etc/nvidia-container-toolkit/nvidia-cdi-refresh.env").write_text(
        "# a comment\n"
        "#NVIDIA_CTK_DEV_ROOT=/no\n"
        "NVIDIA_CTK_LOG_LEVEL=\n"  # without a value
        'NVIDIA_CTK_CDI_OUTPUT_FILE_PATH="/var/run/cdi/other.yaml"\n'
        "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES=uuid\n"
        "LD_PRELOAD=/evil.so\n"
    )
    host.install()

    host.specs()

    assert other.read_text() == spec("0", "MIG-1", "all")
    assert host.spec_in_run.read_text() == "not the one"
    assert host.runs() == ["cdi generate"]
    lines = (host.root / "variables").read_text().splitlines()
    assert "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES=uuid" in lines
    assert not [line for line in lines if "OUTPUT" in line or "DEV_ROOT" in line or "evil" in line]


@needs_root
def test_several_specs_of_one_run_get_the_file_names_of_the_tool(host: CdiHost) -> None:
    host.spec_in_run.write_text(spec("0"))
    more = spec("0", kind="nvidia.com/gpu.coherent")
    host.install(output=spec("0", "1") + more)

    host.specs()

    assert host.spec_in_run.read_text() == spec("0", "1")
    assert host.spec_in_run.with_name("nvidia.gpu.coherent.yaml").exists() is False
    assert host.spec_in_run.with_name("nvidia.coherent.yaml").read_text() == more


@needs_root
@pytest.mark.parametrize(
    ("then", "output", "why"),
    [
        ("echo no driver >&2; exit 1", spec("0", "1"), "ended with status 1: no driver"),
        ("kill -KILL $$", spec("0", "1")[:60], "was killed by SIGKILL"),
        ("", "", "wrote no spec"),
        ("", spec("0", "1")[:41], "is not a CDI spec: cdiVersion, kind or devices are missing"),
        ("", 'cdiVersion: 0.5.0\nkind: "nvidia', "is not a CDI spec: .*not readable as YAML"),
        ("", "No devices were found", "is not a CDI spec"),
        ("", spec("0") + "# x\n" * 300_000, r"nvidia-ctk .* wrote more than 1048576 bytes"),
        ("sleep 1000", spec("0", "1"), "did not end within 2 s and was killed"),
    ],
    ids=[
        "error",
        "killed",
        "no output",
        "cut off",
        "not YAML",
        "no spec",
        "too long",
        "too slow",
    ],
)
def test_a_failed_tool_leaves_the_spec_unchanged(
    host: CdiHost, then: str, output: str, why: str
) -> None:
    host.spec_in_run.write_text(spec("0"))
    host.install(then, output=output)

    with pytest.raises(errors.HostError, match=why) as caught:
        host.specs(timeout_s=2.0 if "sleep" in then else 60.0)

    assert caught.value.reason is reasons.Reason.DEVICE_FILES_FAILED
    assert "nvidia-ctk" in caught.value.message
    assert host.spec_in_run.read_text() == spec("0")
    assert [path.name for path in host.spec_in_run.parent.iterdir()] == ["nvidia.yaml"]


def test_an_unwritable_spec_is_kept_with_a_warning(host: CdiHost) -> None:
    host.spec_in_run.write_text(spec("0"))
    host.spec_in_run.parent.chmod(0o555)
    host.install()

    with privileges.bound_by_file_modes():
        warnings = host.specs()

    assert warnings == ("cdi_spec_kept /run/cdi/nvidia.yaml its folder cannot be written to")
    assert host.runs() == []


@needs_root
def test_a_spec_without_devices_is_skipped(host: CdiHost) -> None:
    host.spec_in_run.write_text(spec("0"))
    for message in ("invalid spec, no devices", "invalid: empty device edits"):
        host.install(f'echo "{message}" >&2; exit 1', output="")
        skipped = "device_files_skipped /run/cdi/nvidia.yaml it would have no device"
        assert host.specs() == skipped


@needs_root
def test_a_stale_temporary_file_is_replaced_and_a_write_error_is_reported(host: CdiHost) -> None:
    host.spec_in_run.write_text(spec("0"))
    temporary = host.spec_in_run.with_name(".nvidia.yaml.new")
    temporary.write_text("half")
    host.install()

    host.specs()
    assert not temporary.exists()
    host.spec_in_run.write_text(spec("0"))
    temporary.mkdir()
    with pytest.raises(errors.HostError, match=r"cannot write .*/nvidia\.yaml: Is a directory"):
        host.specs()

    assert host.spec_in_run.read_text() == spec("0")


@needs_root
def test_the_management_spec_uses_the_hosts_paths(host: CdiHost) -> None:
    host.roots = root_filesystems.host_roots(
        host.root,
        driver="/run/nvidia/driver",
        driver_here=pathlib.Path("/driver-root"),
        cdi_hook=pathlib.Path("/usr/local/nvidia/toolkit/nvidia-cdi-hook"),
    )
    host.install()

    assert host.specs(makes_management=True).endswith(host.management.name)

    assert host.management.read_text() == spec("0", "MIG-1", "all")
    (line,) = host.runs()
    assert line == (
        "cdi generate --mode=management --vendor=management.nvidia.com --class=gpu "
        "--driver-root=/run/nvidia/driver --dev-root=/ "
        "--nvidia-cdi-hook-path=/usr/local/nvidia/toolkit/nvidia-cdi-hook"
    )


@needs_root
def test_paths_in_a_spec_of_our_own_tool_are_transformed_to_the_hosts(
    host: CdiHost, tmp_path: pathlib.Path
) -> None:
    host.install()
    roots = root_filesystems.host_roots(
        tmp_path / "empty",
        driver="/run/nvidia/driver",
        driver_here=pathlib.Path("/driver-root"),
        dev_here=pathlib.Path("/host"),
    )

    cdi.refresh(roots, makes_management=True, timeout_s=30.0, own_root=host.root)

    assert host.runs()[0].endswith("--driver-root=/driver-root --dev-root=/host")
    assert host.runs()[1:] == [
        "cdi transform root --from=/driver-root --to=/run/nvidia/driver",
        "cdi transform root --from=/host --to=/",
    ]
    assert host.management.read_text() == (
        spec("0", "MIG-1", "all")
        + "# --from=/driver-root --to=/run/nvidia/driver\n# --from=/host --to=/\n"
    )


def test_the_management_spec_is_skipped_without_tool_or_folder(host: CdiHost) -> None:
    assert host.specs(makes_management=True) == (
        "device_files_skipped management.nvidia.com-gpu.yaml "
        "nvidia-ctk is found neither here nor on the host"
    )
    host.install()
    (host.root / "run/cdi").rmdir()
    assert host.specs(makes_management=True).endswith(
        "/var/run/cdi is found neither here nor on the host"
    )
    assert host.runs() == []


@needs_root
def test_device_nodes_are_created_before_the_spec(host: CdiHost) -> None:
    proc = proc_tree.ProcTree(host.root / "proc")
    proc.add_devices({"nvidia-caps": 240})
    proc.add_capabilities(0, {"gi1": 12})
    host.spec_in_run.write_text(spec("0"))
    host.install('for each in /dev/nvidia-caps/*; do echo "# $each"; done')

    with structlog.testing.capture_logs() as logs:
        device_nodes.refresh_files(host.roots, proc=proc.root)

    if logs[0]["event"] == "device_files_skipped":
        pytest.skip(f"no nodes can be made here: {logs[0]['why']}")
    assert host.spec_in_run.read_text().endswith("# /dev/nvidia-caps/nvidia-cap12\n")


def test_programs_are_searched_where_the_driver_has_its_device_nodes(
    tmp_path: pathlib.Path,
) -> None:
    driver, host = tmp_path / "driver-root", tmp_path / "host"
    roots = root_filesystems.host_roots(host, driver="/run/nvidia/driver", driver_here=driver)
    at_driver = programs.Root(path=driver)
    at_host = programs.Root(path=host, driver="/run/nvidia/driver")

    assert programs.roots(roots) == (programs.Root(), at_host, at_driver, programs.Root(path=host))
    with_driver = dataclasses.replace(roots, dev_here=driver)
    assert programs.roots(with_driver)[1:3] == (at_driver, at_host)
    at_top = dataclasses.replace(roots, driver=ROOT, driver_here=ROOT, host_here=ROOT)
    assert programs.roots(at_top) == (programs.Root(),)
