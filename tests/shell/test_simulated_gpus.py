"""The simulated GPUs of commands: their file, what they keep, and what real ones refuse."""

import json
import pathlib

import pytest

from tests.rigs.shell.commandline import ONE_LAYOUT, SPEC, Shell


@pytest.fixture
def precious(tmp_path: pathlib.Path) -> dict[str, pathlib.Path]:
    """A journal and a verified layout, by the name of their option."""
    files = {name: tmp_path / name for name in ("journal-file", "verified-layout-file")}
    for file in files.values():
        file.write_text("precious")
    return files


def test_a_fresh_simulation_leaves_a_journal_that_another_node_may_have(
    shell: Shell, precious: dict[str, pathlib.Path]
) -> None:
    files = [f"--{name}={file}" for name, file in precious.items()]
    shell("apply", "no-such-layout", "-f", shell.file(ONE_LAYOUT), "--fresh", *SPEC, *files)

    # An unreadable journal is moved aside, and kept.
    journal = precious["journal-file"]
    kept = [*journal.parent.glob(f"{journal.name}*"), precious["verified-layout-file"]]
    assert [file.read_text() for file in kept] == ["precious", "precious"]


@pytest.mark.parametrize(
    ("command", "flag"), [("apply", ("--fresh",)), ("boot", ()), ("status", ()), ("doctor", ())]
)
def test_real_gpus_cannot_start_afresh_and_nothing_is_deleted(
    shell: Shell, precious: dict[str, pathlib.Path], command: str, flag: tuple[str, ...]
) -> None:
    environ = {
        f"MIG_MANAGER_{name.upper().replace('-', '_')}": str(file)
        for name, file in precious.items()
    }

    answer = shell(command, *flag, **environ, **({} if flag else {"MIG_MANAGER_FRESH": "true"}))

    assert answer.status == 2
    assert "--fresh resets simulated GPUs; name them with --simulate" in answer.err
    assert [file.read_text() for file in precious.values()] == ["precious", "precious"]


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (b"", ()),
        (b"{}", ("--simulate", "1xA30")),
        (b"[]", ("--simulate", "1xA30", "--fresh")),
        (b"\xff\xfe", ()),
        (b'{"options": 3}', ("--simulate", "1xA30", "--fresh")),
    ],
)
def test_a_state_file_of_another_program_is_refused_and_kept(
    shell: Shell, tmp_path: pathlib.Path, content: bytes, options: tuple[str, ...]
) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)

    answer = shell("status", "--simulate-state", str(path), *options)

    assert answer.status == 2
    assert "has no simulated GPUs" in answer.err
    assert "remedy: Remove the file, or name another one with --simulate-state." in answer.err
    assert path.read_bytes() == content


def test_a_change_of_gpus_that_cannot_be_saved_is_no_bug(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "state"
    state = ("--simulate-state", str(path))
    shell("status", *state, "--simulate", "1xA30")
    path.with_name("state.new").mkdir()

    answer = shell("apply", "all-balanced", *state)

    assert answer.status == 2
    assert f"cannot save simulated GPUs in {path}: Is a directory" in answer.err
    assert "remedy: Name another file with --simulate-state." in answer.err


@pytest.mark.parametrize("part", ["spec", "seed"])
def test_a_state_file_without_its_texts_is_refused(
    shell: Shell, tmp_path: pathlib.Path, part: str
) -> None:
    path = tmp_path / "state"
    shell("status", "--simulate-state", str(path), "--simulate", "1xA30")
    state = json.loads(path.read_text())
    (state if part in state else state["options"])[part] = [7]
    path.write_text(json.dumps(state))

    answer = shell("status", "--simulate-state", str(path))

    assert answer.status == 2
    assert "has no simulated GPUs" in answer.err


def test_a_simulated_node_is_announced_once_and_may_be_mixed(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    state = ("--simulate-state", str(tmp_path / "state.json"))
    missing = shell("status", *state)
    answer = shell("status", *state, "--simulate", "1xA100-SXM4-80GB+1xA30")

    assert missing.status == 2
    assert "create it with --simulate" in missing.err
    assert "NVIDIA A100-SXM4-80GB" in answer.out
    assert "NVIDIA A30" in answer.out
    unknown = shell("apply", "x", *state)
    created = "simulated GPUs: 1 NVIDIA A100-SXM4-80GB + 1 NVIDIA A30, in "
    forgotten = shell("status", MIG_MANAGER_SIMULATE_STATE=state[1])
    answers = (answer, unknown, forgotten)
    assert [created in each.err for each in answers] == [True, False, True]
    assert "simulated" not in answer.out
    # A state file holds one node.
    assert shell("status", *state).status == 0
    assert shell("status", *state, "--simulate", "1xA30").status == 2
    assert shell("status", *state, "--simulate", "a100-sxm4-80gb+A30").status == 0
