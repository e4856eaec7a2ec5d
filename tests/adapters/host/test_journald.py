"""What journald has, by a program that stands in for ``journalctl``."""

import pathlib

import pytest

from mig_manager import errors
from mig_manager.adapters.host import journald, programs
from tests.rigs.programs import write_script


def read(folder: pathlib.Path, selection: tuple[str, ...] = journald.OF_DRIVER) -> str:
    search = programs.Programs((), search_path=str(folder))
    return journald.read(search, selection, timeout_s=30.0)


def test_the_last_lines_of_a_selection_are_requested(tmp_path: pathlib.Path) -> None:
    write_script(tmp_path / "journalctl", 'echo "$@"')

    assert read(tmp_path) == "--no-pager --quiet -o short-iso -n 2000 -k -g NVRM\n"
    assert "-u mig-manager-boot.service" in read(tmp_path, journald.OF_UNITS)


def test_nothing_that_matches_is_an_empty_answer(tmp_path: pathlib.Path) -> None:
    write_script(tmp_path / "journalctl", "exit 1")

    assert read(tmp_path) == ""


def test_a_refusal_has_its_last_line(tmp_path: pathlib.Path) -> None:
    write_script(tmp_path / "journalctl", "echo 'Access denied' >&2; exit 1")

    with pytest.raises(errors.HostError, match="Access denied"):
        read(tmp_path)


def test_a_machine_without_journald_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.HostError, match="journalctl is not found"):
        read(tmp_path)
