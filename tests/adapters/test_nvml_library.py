"""Where NVML's library is searched, besides what the loader finds."""

import pathlib

from mig_manager.adapters.nvml import library


def put(root: pathlib.Path, folder: str) -> pathlib.Path:
    library = root / folder / "libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    return library


def test_the_library_is_found_below_the_first_root_that_has_it(tmp_path: pathlib.Path) -> None:
    put(tmp_path / "second", "usr/lib64")
    wanted = put(tmp_path / "first", "usr/lib/x86_64-linux-gnu")
    roots = (str(tmp_path / "none"), str(tmp_path / "first"), str(tmp_path / "second"))

    assert library.find(roots, is_known=lambda: False) == str(wanted)


def test_a_library_that_the_loader_finds_is_left_to_the_loader(tmp_path: pathlib.Path) -> None:
    put(tmp_path, "usr/lib64")

    assert library.find([str(tmp_path)], is_known=lambda: True) is None


def test_where_no_root_has_it_the_loader_says_what_is_wrong(tmp_path: pathlib.Path) -> None:
    assert library.find([str(tmp_path)], is_known=lambda: False) is None


def test_without_a_root_the_loader_is_not_asked() -> None:
    def ask() -> bool:
        raise AssertionError

    assert library.find([], is_known=ask) is None


def test_a_folder_by_the_librarys_name_is_no_library(tmp_path: pathlib.Path) -> None:
    (tmp_path / "usr/lib64/libnvidia-ml.so.1").mkdir(parents=True)

    assert library.find([str(tmp_path)], is_known=lambda: False) is None
