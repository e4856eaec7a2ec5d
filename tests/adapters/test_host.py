"""What the operating system tells of itself."""

import pathlib
import uuid

from mig_manager.adapters.host import procfs


def test_a_boot_has_an_id_of_its_own() -> None:
    assert procfs.boot_id() == str(uuid.UUID(procfs.boot_id()))


def test_where_the_system_tells_no_boot_id_there_is_none(tmp_path: pathlib.Path) -> None:
    assert procfs.boot_id(tmp_path / "none") == ""
