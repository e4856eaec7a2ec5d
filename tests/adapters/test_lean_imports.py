"""Modules that are there and not loaded, made of files."""

import importlib
import pathlib
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

from mig_manager.adapters import lean_imports

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules that note in ``lean_diary`` when they run."""
    monkeypatch.syspath_prepend(tmp_path)
    loaded_before = set(sys.modules)

    def write(**files: str) -> None:
        for name, text in {"lean_diary": "ran = []", **files}.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            note = "import lean_diary\nlean_diary.ran.append(__name__)\n"
            path.write_text((note if files.get(name) else "") + textwrap.dedent(text))
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - loaded_before:
        del sys.modules[name]


def ran() -> list[str]:
    names: list[str] = importlib.import_module("lean_diary").ran
    return names


def test_a_deferred_module_runs_once_at_its_first_use(write: Write) -> None:
    write(lean_one="value = 7")
    lean_imports.defer("lean_one")
    first = importlib.import_module("lean_one")
    assert importlib.import_module("lean_one") is first
    assert ran() == []
    # As code does that uses it only if it is loaded.
    assert not sys.modules.get("lean_one")
    assert (first.value, first.value) == (7, 7)
    assert sys.modules.get("lean_one")
    assert ran() == ["lean_one"]
    assert type(first) is type(sys)


def package(name: str, init: str) -> None:
    place = pathlib.Path(sys.path[0]) / name
    place.mkdir(exist_ok=True)
    (place / "__init__.py").write_text(
        "import lean_diary\nlean_diary.ran.append(__name__)\n" + init
    )


def test_a_deferred_package_runs_before_its_modules(write: Write) -> None:
    write(lean_two__part="from lean_two import x")
    package("lean_two", "x = 1\n")
    lean_imports.defer("lean_two")
    assert importlib.import_module("lean_two.part").x == 1
    assert ran() == ["lean_two", "lean_two.part"]


def test_skipping_init_imports_modules_without_their_package(write: Write) -> None:
    write(lean_three__part="import lean_three.other as other", lean_three__other="x = 1")
    package("lean_three", "from lean_three import part\ndef sum_up(): return part.other.x\n")
    lean_imports.skip_init("lean_three")
    part = importlib.import_module("lean_three.part")
    assert ran() == ["lean_three.part", "lean_three.other"]
    whole = importlib.import_module("lean_three")
    assert whole.part is part
    assert ran() == ["lean_three.part", "lean_three.other"]
    assert whole.sum_up() == 1
    assert ran() == ["lean_three.part", "lean_three.other", "lean_three"]


def test_init_can_be_skipped_for_nested_packages(write: Write) -> None:
    write(lean_four="")
    package("lean_four", "")
    package("lean_four/inner", "x = 1\n")
    lean_imports.skip_init("lean_four")
    lean_imports.skip_init("lean_four.inner")
    assert importlib.import_module("lean_four").inner.x == 1
    assert ran() == ["lean_four.inner"]


def test_a_missing_attribute_of_a_deferred_module_is_an_error(write: Write) -> None:
    write(lean_five="import sys\nhas_it = hasattr(sys.modules[__name__], 'later')\nlater = 1")
    lean_imports.defer("lean_five")
    module = importlib.import_module("lean_five")
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing
    assert module.has_it is False


def test_a_failing_deferred_module_raises_at_its_use_and_is_retried(write: Write) -> None:
    write(lean_six="import lean_diary\nif len(lean_diary.ran) == 1: raise OSError\nx = 2")
    lean_imports.defer("lean_six")
    module = importlib.import_module("lean_six")
    with pytest.raises(OSError):  # noqa: PT011 - as the file says
        _ = module.x
    assert module.x == 2


def test_two_threads_both_get_the_whole_module(write: Write) -> None:
    write(lean_seven="import lean_diary\nlean_diary.go.wait(30)\nx = 1")
    diary = importlib.import_module("lean_diary")
    gate = threading.Event()
    vars(diary)["go"] = gate
    lean_imports.defer("lean_seven")
    module = importlib.import_module("lean_seven")
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(module.x)) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(30)
    assert values == [1, 1]
    assert ran() == ["lean_seven"]


@pytest.mark.parametrize("skip", [lean_imports.defer, lean_imports.skip_init])
def test_loaded_and_missing_modules_are_not_deferred(skip: Callable[[str], None]) -> None:
    before = sys.modules["json"]
    skip("json")
    skip("no_such_module_anywhere")
    assert sys.modules["json"] is before
    assert "no_such_module_anywhere" not in sys.modules


def test_a_deferred_class_is_loaded_at_its_call(write: Write) -> None:
    write(
        lean_eight="class Heavy:\n    def __init__(self, x): self.x = x",
        lean_user="from lean_eight import Heavy",
    )
    lean_imports.defer("lean_eight")
    with lean_imports.deferred_class("lean_eight", "Heavy"):
        user = importlib.import_module("lean_user")
    assert ran() == ["lean_user"]
    assert user.Heavy(3).x == 3
    assert isinstance(importlib.import_module("lean_eight").Heavy, type)


def test_a_class_that_is_loaded_or_that_the_body_loads_stays(write: Write) -> None:
    write(lean_ten="class Heavy: pass\nother = 1")
    lean_imports.defer("lean_ten")
    module = importlib.import_module("lean_ten")
    with lean_imports.deferred_class("lean_ten", "Heavy"):
        assert module.other == 1
    assert isinstance(heavy := module.Heavy, type)
    with lean_imports.deferred_class("lean_ten", "Heavy"):
        assert module.Heavy is heavy
    assert module.Heavy is heavy


def test_an_omitted_module_can_be_imported_later(write: Write) -> None:
    write(lean_whole__part="value = 7")
    package("lean_whole", "from lean_whole import part\nname = part.__name__\n")
    with lean_imports.omitted("lean_whole.part"):
        whole = importlib.import_module("lean_whole")
    assert whole.name == "lean_whole.part"
    assert ran() == ["lean_whole"]
    assert not hasattr(whole, "part")
    part = importlib.import_module("lean_whole.part")
    assert whole.part.value == part.value == 7
    # Once loaded it is not omitted.
    with lean_imports.omitted("lean_whole.part"):
        assert importlib.import_module("lean_whole.part") is part
    assert importlib.import_module("lean_whole.part") is part


@pytest.mark.parametrize("is_used_first", [False, True])
def test_a_function_may_be_imported_from_a_deferred_module(
    *, is_used_first: bool, write: Write
) -> None:
    write(lean_call="def double(n): return 2 * n\nvalue = 7")
    lean_imports.defer("lean_call", "double")
    module = importlib.import_module("lean_call")
    early = module.double
    assert ran() == []
    if is_used_first:
        assert module.value == 7
    assert early(4) == 8
    assert ran() == ["lean_call"]
    assert (module.double(5), early(6), module.value) == (10, 12, 7)
