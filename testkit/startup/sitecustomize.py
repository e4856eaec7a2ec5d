"""Have the simulated driver of each process that tests start fail on demand.

Python imports this module in each process that finds it on ``PYTHONPATH``, where
``tests/conftest.py`` puts it. So what ships needs no way to load what tests it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

_LIBRARY = "mig_manager.sandbox.driver.library"


class _Instruments(importlib.abc.MetaPathFinder):
    """Finds the simulated library, and has ``nvml_faults`` imported after it.

    Not earlier: most processes need neither.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the library's spec, with a loader that goes on to ``nvml_faults``."""
        if fullname != _LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_both(module: types.ModuleType) -> None:
            execute(module)
            importlib.import_module("testkit.nvml_faults")

        spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Instruments())
