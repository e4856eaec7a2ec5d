"""Spare the process what libraries import at their start and we never use.

A module that is put off is in ``sys.modules`` as if it had been imported, but its code runs only
when somebody asks it for something. Nobody can see a difference but in what it costs; compare
``importlib.util.LazyLoader``, which would load at the second ``import`` already. What each use of
this saves is written down in docs/footprint.md.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


def put_off(name: str, *functions: str) -> None:
    """Have a module run its code at its first use; its submodules' import is a use as well.

    Args:
        name: The module's; whatever is loaded already, or does not exist, is left alone.
        functions: What may be imported from it by name without that being a use; to call it is.
    """
    module = _placed(name)
    if module is not None:
        # Missed by whoever imports a submodule, who would otherwise come before the parent.
        vars(module).pop("__path__", None)
        for function in functions:
            setattr(module, function, _first_call(module, function))


def _first_call(module: types.ModuleType, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if vars(module).get(name) is call:
            delattr(module, name)
        return getattr(module, name)(*args, **kwargs)

    return call


def hollow(package: str) -> None:
    """Have a package's modules importable without its ``__init__``.

    That runs when the package is asked for a name which it has not got from its modules; so this
    is for packages whose ``__init__`` does nothing but import, for other people's convenience.

    Args:
        package: Its name; its parent is hollow too, or cheap.
    """
    _placed(package)


@contextlib.contextmanager
def called_later(module: str, name: str) -> Iterator[None]:
    """Let a class be imported by name during the body without being loaded.

    Who does ``from module import name`` gets a function that loads the class when it is called,
    which is all that may be done with it.

    Args:
        module: Where the class is found; itself cheap, hollow or put off.
        name: The class; one that is loaded already is left alone.
    """
    place = importlib.import_module(module)
    if name in vars(place):
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    setattr(place, name, call)
    try:
        yield
    finally:
        if vars(place).get(name) is call:
            delattr(place, name)


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Let a package import a module of its own during the body without that being loaded.

    For what a package's ``__init__`` imports for other people's convenience. Afterwards the module
    is not there, and whoever imports it gets it as ever.

    Args:
        name: The module; one that is loaded already is left alone.
    """
    if name in sys.modules:
        yield
        return
    stand_in = sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        parent, _, own = name.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(own) is stand_in:
            delattr(sys.modules[parent], own)


class _PutOff(types.ModuleType):
    """A module whose code has not been run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Names that no module's code has a use for: it runs in this namespace.
        self.__put_off_lock__ = threading.RLock()
        self.__put_off_runner__: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Run the module's code, whose result has the name if anything has."""
        is_own_code = vars(self).get("__put_off_runner__") == threading.get_ident()
        if is_own_code or (name == "__path__" and not _is_package(self)):
            # As of one that is being imported; and ``from module import`` asks all for a path.
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with self.__put_off_lock__:
            if type(self) is _PutOff:
                self._run()
        return getattr(self, name)

    def __bool__(self) -> bool:
        """Be no module to who looks whether it is loaded, as logging does for asyncio's tasks."""
        return False

    def _run(self) -> None:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - see _placed
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        self.__put_off_runner__ = threading.get_ident()
        try:
            spec.loader.exec_module(self)
        finally:
            self.__put_off_runner__ = None
        self.__class__ = types.ModuleType  # type: ignore[assignment]


def _is_package(module: types.ModuleType) -> bool:
    spec = vars(module).get("__spec__")
    return spec is not None and spec.submodule_search_locations is not None


def _placed(name: str) -> types.ModuleType | None:
    """Put a module in its place without running it; None if there is nothing to do."""
    if name in sys.modules:
        return None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return None
    module = _PutOff(name)
    for attribute, value in vars(importlib.util.module_from_spec(spec)).items():
        setattr(module, attribute, value)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    return module
