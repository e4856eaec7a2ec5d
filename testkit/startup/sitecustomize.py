"""Have the simulated driver of each process that tests start fail on demand.

Python imports this module in each process that finds it on ``PYTHONPATH``, where
``tests/conftest.py`` puts it. So what ships needs no way to load what tests it. This imports
little, because tests look at what a process loads.
"""

import importlib.machinery
import sys
import types
from collections.abc import Sequence

_LIBRARY = "mig_manager.sandbox.driver.library"


class _Finder:
    """Finds the simulated library, and has ``nvml_faults`` imported after it.

    Not earlier: most processes need neither.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the library's spec, with a loader that goes on to ``nvml_faults``."""
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
