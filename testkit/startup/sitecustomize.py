"""Instrument the simulated driver in the processes that tests start.

Python imports this module in every process that finds it on ``PYTHONPATH``, where
``tests/conftest.py`` puts it. So shipped code never loads test code. It imports little, because
tests check which modules a process loads.
"""

import importlib.machinery
import sys
import types
from collections.abc import Sequence

_LIBRARY = "mig_manager.sandbox.driver.simulated_nvml"


class _Finder:
    """Imports ``nvml_faults`` after the simulated library, because most processes need neither."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the library's spec, with a loader that also imports ``nvml_faults``."""
        if fullname != _LIBRARY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_both(module: types.ModuleType) -> None:
            execute(module)
            import testkit.nvml_faults  # noqa: F401, PLC0415 - it replaces the library's class

        spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
