"""The course of ``acceptance --change-gpu`` over the real adapter, killed in its NVML calls."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.change import course, local
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults
from tests.node import applying_rig, fakes, nvml_rig, scenes, simulated_rig

A30 = "2xA30"


class MortalLibrary(nvml_faults.CountingLibrary):
    """A library whose process dies in one of its calls, before or after what the call does."""

    def __init__(self, state: nvml_faults.SharedState) -> None:
        super().__init__(state)
        self.calls = 0
        self.dies_at = 0
        self.acts_first = False

    @property
    def is_dead(self) -> bool:
        return bool(self.dies_at) and self.calls >= self.dies_at

    def _answer(self, attempt: simulated.Attempt) -> int:
        was_dead = self.is_dead
        self.calls += 1
        if not was_dead and self.is_dead and self.acts_first:
            super()._answer(attempt)
        if self.is_dead:
            raise scenes.Killed
        return super()._answer(attempt)


class Journal(applying_rig.FakeJournal):
    """A journal that a dead process no longer writes."""

    def __init__(self, library: MortalLibrary) -> None:
        super().__init__()
        self._library = library

    def _act(self, name: str) -> None:
        if self._library.is_dead:
            raise scenes.Killed
        super()._act(name)


@dataclasses.dataclass
class Host:
    library: MortalLibrary
    deps: local.Dependencies
    uuid: str
    remaining: int = 0

    @contextlib.contextmanager
    def killing_after(self, count: int) -> Iterator[None]:
        self.remaining = count
        yield
        self.remaining = 0

    @contextlib.contextmanager
    def using(self, uuid: str) -> Iterator[str]:
        client = self.library.state.add_client(uuid, name="user")
        try:
            yield ""
        finally:
            self.library.state.remove_client(client)

    def on_step(self, _index: int) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise course.WorkerKilledError


@contextlib.contextmanager
def host(folder: pathlib.Path) -> Iterator[Host]:
    with nvml_rig.rig(folder / "node", A30) as rig:
        library = MortalLibrary(rig.state)
        simulated.load(library)
        node = applying_rig.Node("off", product="A30")
        deps = dataclasses.replace(
            node.deps, gpus=rig.gpus, journal=Journal(library), clock=fakes.FakeClock()
        )
        found = Host(library, deps, rig.state.boards[1].uuid)
        rig.gpus.on_step = found.on_step
        yield found


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return how many NVML calls the course makes."""
    with host(tmp_path_factory.mktemp("node")) as found:
        course.run(found.deps, found.uuid, found.killing_after, found.using)
        return found.library.calls


@pytest.mark.parametrize("acts_first", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("permille", [1, 30, 111, 222, 333, 444, 555, 666, 777, 888, 970, 999])
def test_after_a_kill_in_any_call_the_gpu_can_be_restored(
    tmp_path: pathlib.Path, calls: int, permille: int, *, acts_first: bool
) -> None:
    with host(tmp_path) as found:
        before = simulated_rig.geometry(found.library.state)
        found.library.dies_at = max(1, calls * permille // 1000)
        found.library.acts_first = acts_first
        with contextlib.suppress(scenes.Killed):
            course.run(found.deps, found.uuid, found.killing_after, found.using)
        assert found.library.is_dead
        found.library.dies_at = found.remaining = 0
        simulated.load(MortalLibrary(found.library.state))

        local.undo_interrupted(found.deps)

        assert simulated_rig.geometry(found.library.state) == before
        assert found.deps.journal.read() is None
