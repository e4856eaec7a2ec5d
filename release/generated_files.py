"""Makes the JSON Schemas and the manual pages from the program's own declarations, for each wheel.

Hatchling runs it (``tool.hatch.build.targets.wheel.hooks`` in ``pyproject.toml``). An editable
install reads its schemas from the checkout, where git ignores them. A test compares them with the
declarations.
"""

import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedFiles(BuildHookInterface):
    """The hook; hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files, and have the wheel include them."""
        # The program's source in this folder, whatever else is installed. A build by root must
        # not leave its bytecode there.
        sys.path.insert(0, self.root)
        sys.dont_write_bytecode = True
        from docs.generator import manual, schemas  # noqa: PLC0415 - see above

        self._folder = tempfile.TemporaryDirectory()
        made = pathlib.Path(self._folder.name)
        _write(made / "man", manual.man_pages())
        build_data["shared_data"][str(made / "man")] = "share/man/man1"  # man searches there
        if version == "editable":
            _write(pathlib.Path(self.root) / "mig_manager" / "schemas", schemas.files())
        else:
            _write(made / "schemas", schemas.files())
            build_data["force_include"][str(made / "schemas")] = "mig_manager/schemas"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has now."""
        self._folder.cleanup()


def _write(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    """Write files into a folder, which then has no others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
