"""Programs of the machine: found where they lie, run there, and not waited for for ever."""

import os
import pathlib

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.host import programs, root_paths
from tests.adapters.host import root_filesystems
from tests.rigs import waiting
from tests.rigs.host.processes import is_dead
from tests.rigs.programs import write_script

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

WHY = reasons.Reason.DEVICE_FILES_FAILED


def run(
    root: pathlib.Path,
    script: str,
    *arguments: str,
    timeout_s: float = 20.0,
    stdin: str = "",
    max_output_bytes: int = programs.MAX_OUTPUT_BYTES,
) -> programs.Finished:
    """Run a shell script as a program that was found below a root, without a change of root."""
    write_script(root / "tool", script)
    program = programs.Program(path=str(root / "tool"), root=pathlib.Path("/"))
    return programs.run(
        program,
        arguments,
        timeout_s=timeout_s,
        reason=WHY,
        stdin=stdin,
        max_output_bytes=max_output_bytes,
    )


def test_a_program_is_found_in_the_first_root_that_has_it(tmp_path: pathlib.Path) -> None:
    driver, host = tmp_path / "driver", tmp_path / "host"
    write_script(host / "usr/bin/nvidia-smi", "exit 0")
    write_script(host / "usr/sbin/only-host", "exit 0")
    write_script(driver / "usr/local/bin/nvidia-smi", "exit 0")
    search = programs.Programs((programs.Root(path=driver), programs.Root(path=host)))

    assert search.find("nvidia-smi") == programs.Program(
        path="/usr/local/bin/nvidia-smi", root=driver
    )
    assert search.find("only-host") == programs.Program(path="/usr/sbin/only-host", root=host)


def test_a_file_that_cannot_be_run_is_not_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "usr/bin/folder").mkdir(parents=True)
    (tmp_path / "usr/bin/text").write_text("no program")
    (tmp_path / "usr/bin/nowhere").symlink_to("/nowhere")
    (tmp_path / "usr/bin/round").symlink_to("round")
    search = programs.Programs(
        (programs.Root(path=tmp_path), programs.Root(path=tmp_path / "missing"))
    )

    assert [search.find(each) for each in ("folder", "text", "nowhere", "round", "none")] == (
        [None] * 5
    )


def test_a_link_is_resolved_below_its_own_root(tmp_path: pathlib.Path) -> None:
    write_script(tmp_path / "opt/nvidia/smi", "exit 0")
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "usr/bin/one").symlink_to("/opt/nvidia/smi")
    (tmp_path / "usr/bin/two").symlink_to("../../../../../opt/nvidia/smi")
    (tmp_path / "usr/bin/sh").symlink_to("/bin/sh-of-the-test-machine")

    for name in ("usr/bin/one", "bin/two", "/usr/bin/one"):
        assert root_paths.resolve(tmp_path, name) == tmp_path / "opt/nvidia/smi"
    assert root_paths.resolve(tmp_path, "usr/bin/sh") is None
    assert root_paths.resolve(tmp_path, "/..") == tmp_path


def test_output_and_exit_status_of_a_program_are_returned(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, 'echo "$1|$2"; cat; echo warned >&2; exit 3', "a b", "$HOME", stdin="in")

    assert (done.status, done.stdout, done.stderr) == (3, "a b|$HOME\nin", "warned\n")
    assert done.failure(WHY).message == f"{tmp_path}/tool a b $HOME ended with status 3: warned"
    assert done.failure(WHY).reason is WHY


def test_a_program_that_was_killed_or_explains_on_stdout_is_reported(
    tmp_path: pathlib.Path,
) -> None:
    killed = run(tmp_path, "kill -SEGV $$")
    explained = run(tmp_path, "printf 'Unable to reset.\\n\\033[31mIn use\\n\\n'; exit 1")

    assert killed.failure(WHY).message.endswith("was killed by SIGSEGV")
    assert explained.failure(WHY).message.endswith("ended with status 1: ?[31mIn use")


def test_a_program_gets_nothing_of_our_own_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")

    output = run(tmp_path, "/usr/bin/env").stdout

    names = {line.partition("=")[0] for line in output.splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "LC_ALL"}


def test_input_larger_than_a_pipe_may_be_answered_in_parts_or_not_be_read(
    tmp_path: pathlib.Path,
) -> None:
    text = "x" * 300_000

    done = run(tmp_path, "exec cat", stdin=text, max_output_bytes=1_000_000)

    assert (done.stdout, done.is_cut) == (text, False)
    assert run(tmp_path, "exit 0", stdin=text).status == 0


def test_orphan_of_a_program_is_killed_and_not_awaited(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "sleep 1000 & echo $!", timeout_s=100.0)

    assert done.status == 0
    waiting.until(lambda: is_dead(int(done.stdout)), "the end of the child")


def test_a_program_that_closes_its_output_is_still_waited_for(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, f"exec >&- 2>&-; sleep 0.2; : > {tmp_path}/done; exit 7")

    assert done.status == 7
    assert (tmp_path / "done").exists()


def test_endless_output_is_bounded_and_ends_at_the_deadline(
    tmp_path: pathlib.Path,
) -> None:
    flood = "head -c 5000000 /dev/zero"
    done = run(tmp_path, f"{flood}; echo last; echo last >&2; exit 1")
    on_stderr = run(tmp_path, f"{flood} >&2; echo the cause >&2; exit 1")

    assert (len(done.stdout), done.is_cut) == (programs.MAX_OUTPUT_BYTES, True)
    assert done.failure(WHY).message.endswith(": last")
    assert (len(on_stderr.stderr), on_stderr.is_cut) == (programs.MAX_OUTPUT_BYTES, False)
    assert on_stderr.stderr.endswith("the cause\n")
    with pytest.raises(errors.HostError, match="did not end within"):
        run(tmp_path, "exec cat /dev/zero", timeout_s=0.5)


def test_a_missing_program_and_a_file_that_is_no_program_are_reported(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "noise").write_bytes(b"\x7fELF")
    (tmp_path / "noise").chmod(0o755)

    for name, why in (("none", "No such file"), ("noise", "Exec format error")):
        program = programs.Program(path=str(tmp_path / name), root=pathlib.Path("/"))
        with pytest.raises(errors.HostError, match=f"{name} --help cannot be run: {why}"):
            programs.run(program, ["--help"], timeout_s=5.0, reason=WHY)


def test_a_driver_that_an_installer_put_aside_brings_its_library_along(
    tmp_path: pathlib.Path,
) -> None:
    aside = tmp_path / "home/kubernetes/bin/nvidia"
    write_script(aside / "bin/nvidia-smi", "exit 0")
    write_script(aside / "lib64/libnvidia-ml.so.1", "exit 0")

    program = programs.Programs((programs.Root(path=tmp_path),)).find("nvidia-smi")

    assert program is not None
    assert program.variables == {
        "LD_PRELOAD": "/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1"
    }


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="chroot(2) is for root")


def program_of(search: programs.Programs, name: str) -> programs.Program:
    program = search.find(name)
    assert program is not None
    return program


@needs_root
def test_a_program_sees_the_root_it_was_found_in(tmp_path: pathlib.Path) -> None:
    root = root_filesystems.filesystem(tmp_path / "root")
    write_script(root / "usr/bin/nvidia-smi", 'cat /etc/name; cat; pwd; echo "$LC_ALL $1"')
    (root / "etc/name").write_text("the driver's\n")
    search = programs.Programs((programs.Root(path=root),))

    done = programs.run(
        program_of(search, "nvidia-smi"), ["--gpu-reset"], timeout_s=20.0, reason=WHY, stdin="in\n"
    )

    assert (done.status, done.stderr) == (0, "")
    assert done.stdout == "the driver's\nin\n/\nC --gpu-reset\n"
    assert done.line == f"/usr/bin/nvidia-smi below {root} --gpu-reset"


@needs_root
def test_a_driver_below_the_hosts_root_brings_its_library_along(tmp_path: pathlib.Path) -> None:
    root = root_filesystems.filesystem(tmp_path / "host")
    driver = root / "run/nvidia/driver"
    write_script(driver / "usr/bin/nvidia-smi", 'echo "$LD_PRELOAD"')
    (driver / "usr/lib64").mkdir(parents=True)
    # As good as any library: it must be there and it must be one.
    root_filesystems.library(driver / "usr/lib64/libnvidia-ml.so.1")
    search = programs.Programs((programs.Root(path=root, driver="/run/nvidia/driver"),))

    done = programs.run(program_of(search, "nvidia-smi"), timeout_s=20.0, reason=WHY)

    assert done.stdout == "/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1\n"


@needs_root
def test_program_below_a_root_is_killed_if_hung_or_reported_if_missing(
    tmp_path: pathlib.Path,
) -> None:
    root = root_filesystems.filesystem(tmp_path / "root")
    write_script(root / "usr/bin/hangs", "sleep 1000")
    search = programs.Programs((programs.Root(path=root),))
    program = program_of(search, "hangs")

    with pytest.raises(errors.HostError, match=f"hangs below {root} did not end within 1 s"):
        programs.run(program, timeout_s=1.0, reason=WHY)
    (root / "usr/bin/hangs").unlink()
    done = programs.run(program, timeout_s=20.0, reason=WHY)

    assert done.failure(WHY).message.endswith(
        f"cannot run /usr/bin/hangs below {root}: No such file or directory"
    )
