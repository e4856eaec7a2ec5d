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
    """Write modules, each of which notes in ``spared_diary`` that it has been run."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def write(**files: str) -> None:
        for name, text in {"spared_diary": "ran = []", **files}.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            note = "import spared_diary\nspared_diary.ran.append(__name__)\n"
            path.write_text((note if files.get(name) else "") + textwrap.dedent(text))
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - known:
        del sys.modules[name]


def ran() -> list[str]:
    found: list[str] = importlib.import_module("spared_diary").ran
    return found


def test_a_module_that_is_put_off_runs_once_at_its_first_use(write: Write) -> None:
    write(spared_one="value = 7")
    lean_imports.defer("spared_one")
    first = importlib.import_module("spared_one")
    assert importlib.import_module("spared_one") is first
    assert ran() == []
    # As whoever has a use for it only if it is loaded looks for it.
    assert not sys.modules.get("spared_one")
    assert (first.value, first.value) == (7, 7)
    assert sys.modules.get("spared_one")
    assert ran() == ["spared_one"]
    assert type(first) is type(sys)


def package(name: str, init: str) -> None:
    place = pathlib.Path(sys.path[0]) / name
    place.mkdir(exist_ok=True)
    (place / "__init__.py").write_text(
        "import spared_diary\nspared_diary.ran.append(__name__)\n" + init
    )


def test_a_package_that_is_put_off_runs_before_its_modules(write: Write) -> None:
    write(spared_two__part="from spared_two import x")
    package("spared_two", "x = 1\n")
    lean_imports.defer("spared_two")
    assert importlib.import_module("spared_two.part").x == 1
    assert ran() == ["spared_two", "spared_two.part"]


def test_the_modules_of_a_hollow_package_come_without_it(write: Write) -> None:
    write(spared_three__part="import spared_three.other as other", spared_three__other="x = 1")
    package("spared_three", "from spared_three import part\ndef sum_up(): return part.other.x\n")
    lean_imports.skip_init("spared_three")
    part = importlib.import_module("spared_three.part")
    assert ran() == ["spared_three.part", "spared_three.other"]
    whole = importlib.import_module("spared_three")
    assert whole.part is part
    assert ran() == ["spared_three.part", "spared_three.other"]
    assert whole.sum_up() == 1
    assert ran() == ["spared_three.part", "spared_three.other", "spared_three"]


def test_packages_within_a_hollow_one_may_be_hollow_too(write: Write) -> None:
    write(spared_four="")
    package("spared_four", "")
    package("spared_four/inner", "x = 1\n")
    lean_imports.skip_init("spared_four")
    lean_imports.skip_init("spared_four.inner")
    assert importlib.import_module("spared_four").inner.x == 1
    assert ran() == ["spared_four.inner"]


def test_what_a_module_has_not_got_is_still_missed(write: Write) -> None:
    write(spared_five="import sys\nhas_it = hasattr(sys.modules[__name__], 'later')\nlater = 1")
    lean_imports.defer("spared_five")
    module = importlib.import_module("spared_five")
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing
    assert module.has_it is False


def test_a_module_that_fails_fails_who_uses_it_and_is_tried_again(write: Write) -> None:
    write(spared_six="import spared_diary\nif len(spared_diary.ran) == 1: raise OSError\nx = 2")
    lean_imports.defer("spared_six")
    module = importlib.import_module("spared_six")
    with pytest.raises(OSError):  # noqa: PT011 - as the file says
        _ = module.x
    assert module.x == 2


def test_two_threads_both_get_the_whole_module(write: Write) -> None:
    write(spared_seven="import spared_diary\nspared_diary.go.wait(30)\nx = 1")
    diary = importlib.import_module("spared_diary")
    gate = threading.Event()
    vars(diary)["go"] = gate
    lean_imports.defer("spared_seven")
    module = importlib.import_module("spared_seven")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(module.x)) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(30)
    assert found == [1, 1]
    assert ran() == ["spared_seven"]


@pytest.mark.parametrize("spare", [lean_imports.defer, lean_imports.skip_init])
def test_what_is_loaded_or_does_not_exist_is_left_alone(spare: Callable[[str], None]) -> None:
    before = sys.modules["json"]
    spare("json")
    spare("no_such_module_anywhere")
    assert sys.modules["json"] is before
    assert "no_such_module_anywhere" not in sys.modules


def test_a_class_that_is_called_later_is_loaded_then(write: Write) -> None:
    write(
        spared_eight="class Heavy:\n    def __init__(self, x): self.x = x",
        spared_user="from spared_eight import Heavy",
    )
    lean_imports.defer("spared_eight")
    with lean_imports.deferred_class("spared_eight", "Heavy"):
        user = importlib.import_module("spared_user")
    assert ran() == ["spared_user"]
    assert user.Heavy(3).x == 3
    assert isinstance(importlib.import_module("spared_eight").Heavy, type)


def test_a_class_that_is_loaded_is_not_replaced(write: Write) -> None:
    write(spared_nine="class Heavy: pass")
    module = importlib.import_module("spared_nine")
    heavy = module.Heavy
    with lean_imports.deferred_class("spared_nine", "Heavy"):
        assert module.Heavy is heavy
    assert module.Heavy is heavy


def test_a_class_that_is_loaded_meanwhile_stays(write: Write) -> None:
    write(spared_ten="class Heavy: pass\nother = 1")
    lean_imports.defer("spared_ten")
    module = importlib.import_module("spared_ten")
    with lean_imports.deferred_class("spared_ten", "Heavy"):
        assert module.other == 1
    assert isinstance(module.Heavy, type)


def test_a_module_that_is_left_out_is_there_for_whoever_imports_it_later(write: Write) -> None:
    write(spared_whole__part="value = 7")
    package("spared_whole", "from spared_whole import part\nname = part.__name__\n")
    with lean_imports.omitted("spared_whole.part"):
        whole = importlib.import_module("spared_whole")
    assert whole.name == "spared_whole.part"
    assert ran() == ["spared_whole"]
    assert not hasattr(whole, "part")
    assert importlib.import_module("spared_whole.part").value == 7
    assert whole.part.value == 7


def test_a_module_that_is_loaded_is_not_left_out(write: Write) -> None:
    write(spared_early__part="value = 7")
    package("spared_early", "")
    part = importlib.import_module("spared_early.part")
    with lean_imports.omitted("spared_early.part"):
        assert importlib.import_module("spared_early.part") is part
    assert importlib.import_module("spared_early.part") is part


def test_a_function_may_be_imported_from_a_module_that_is_put_off(write: Write) -> None:
    write(spared_call="def double(n): return 2 * n\nvalue = 7")
    lean_imports.defer("spared_call", "double")
    module = importlib.import_module("spared_call")
    early = module.double
    assert ran() == []
    assert early(4) == 8
    assert ran() == ["spared_call"]
    assert (module.double(5), early(6), module.value) == (10, 12, 7)


def test_a_function_imported_early_works_when_another_use_came_first(write: Write) -> None:
    write(spared_late="def double(n): return 2 * n\nvalue = 7")
    lean_imports.defer("spared_late", "double")
    module = importlib.import_module("spared_late")
    early = module.double
    assert module.value == 7
    assert early(4) == 8
    assert ran() == ["spared_late"]
