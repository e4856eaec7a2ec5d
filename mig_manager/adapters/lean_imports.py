"""Skip imports that a dependency runs at start-up and this process never uses.

A deferred module is in ``sys.modules`` as usual, but its code runs at the first use of one of its
attributes (``importlib.util.LazyLoader`` would run it at the second ``import``).
docs/performance.md has the savings of the largest uses; do not use this for less than 0.5 MB and
5 ms.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


def defer(name: str, *functions: str) -> None:
    """Run a module's code at its first use, or at the import of a submodule.

    The ``functions`` may be imported from the module without running it; a call of one does.
    """
    module = _install(name)
    if module is not None:
        # The missing path makes the import of a submodule run the parent first.
        vars(module).pop("__path__", None)
        for function in functions:
            setattr(module, function, _deferred_function(module, function))


def skip_init(package: str) -> None:
    """Make a package's modules importable without running its ``__init__``.

    It runs at the first use of another name of the package, so it must only import for
    convenience. The package's parent must be skipped too, or cheap to import.
    """
    _install(package)


@contextlib.contextmanager
def deferred_class(module: str, name: str) -> Iterator[None]:
    """Let the body import a class as a function that loads it when called, if it is not loaded.

    The module must be cheap to import, deferred, or skipped.
    """
    owner = importlib.import_module(module)
    if name in vars(owner):
        yield
        return

    def construct(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    setattr(owner, name, construct)
    try:
        yield
    finally:
        if vars(owner).get(name) is construct:
            delattr(owner, name)


@contextlib.contextmanager
def omitted(name: str) -> Iterator[None]:
    """Let the body import a module without loading it; later imports load it.

    For a module that a package's ``__init__`` imports for convenience only.
    """
    if name in sys.modules:
        yield
        return
    placeholder = sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]
        parent, _, short_name = name.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(short_name) is placeholder:
            delattr(sys.modules[parent], short_name)


class _DeferredModule(types.ModuleType):
    """A module whose code has not run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Dunder names, because the module's own code runs in this namespace.
        self.__deferred_lock__ = threading.RLock()
        self.__deferred_runner__: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Run the module's code, then get the name again."""
        is_own_code = vars(self).get("__deferred_runner__") == threading.get_ident()
        spec = vars(self).get("__spec__")
        is_package = spec is not None and spec.submodule_search_locations is not None
        if is_own_code or (name == "__path__" and not is_package):
            # ``from module import name`` looks up a path on every module.
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with self.__deferred_lock__:
            if type(self) is _DeferredModule:
                self._run()
        return getattr(self, name)

    def __bool__(self) -> bool:
        """Be false, so that ``if sys.modules.get(name)`` (as in logging) tests for its code."""
        return False

    def _run(self) -> None:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - see _install
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        self.__deferred_runner__ = threading.get_ident()
        try:
            spec.loader.exec_module(self)
        finally:
            self.__deferred_runner__ = None
        self.__class__ = types.ModuleType  # type: ignore[assignment]


def _deferred_function(module: types.ModuleType, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if vars(module).get(name) is call:
            delattr(module, name)
        return getattr(module, name)(*args, **kwargs)

    return call


def _install(name: str) -> types.ModuleType | None:
    """Put a module into ``sys.modules`` without running it; None if it is loaded or missing."""
    if name in sys.modules:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        # Its package is not installed.
        return None
    if spec is None or spec.loader is None:
        return None
    module = _DeferredModule(name)
    for attribute, value in vars(importlib.util.module_from_spec(spec)).items():
        setattr(module, attribute, value)
    sys.modules[name] = module
    parent, _, short_name = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], short_name, module)
    return module
