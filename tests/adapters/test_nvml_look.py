"""A look that knows an earlier one: the same answer for fewer questions, or all of them anew."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from bench import matrix
from mig_manager.adapters import clock, nvml
from mig_manager.core import model, planner
from mig_manager.sandbox import nvml as simulated
from tests.adapters import test_nvml_counts

LASTING = test_nvml_counts.LASTING - {"nvmlDeviceGetMemoryInfo"}
"""The memory tells whether ECC was switched."""


class Node:
    """A simulated node as a transition leaves or finds it, and the GPUs as we see them."""

    def __init__(self, path: pathlib.Path) -> None:
        self.state = simulated.SharedState(path)
        self.library = simulated.install(path)
        self.gpus = nvml.NvmlGpus(clock=clock.SystemClock())

    def look(
        self, before: model.Look | None = None
    ) -> tuple[model.Look, collections.Counter[str]]:
        """Look, and count what was asked about what lasts."""
        before_this = collections.Counter(self.library.counts)
        look = self.gpus.look(before)
        asked = self.library.counts - before_this
        return look, collections.Counter({n: count for n, count in asked.items() if n in LASTING})


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[Node]:
    matrix.prepare(matrix.TRANSITIONS[0], tmp_path / "gpus.json")
    yield Node(tmp_path / "gpus.json")
    simulated.uninstall()


@pytest.mark.parametrize("transition", matrix.TRANSITIONS, ids=lambda t: f"{t.product}: {t.name}")
def test_whatever_has_changed_an_earlier_look_leads_to_the_same_answer(
    transition: matrix.Transition, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "gpus.json"
    after = matrix.prepare(dataclasses.replace(transition, before=transition.after), path)
    path.unlink()
    matrix.prepare(transition, path)
    node = Node(path)
    try:
        before, _ = node.look()
        node.state.update(lambda _: (after, None))

        assert node.look(before)[0] == node.look()[0] != before
    finally:
        simulated.uninstall()


def test_what_lasts_is_not_asked_again(node: Node) -> None:
    before, first = node.look()
    _, again = node.look(before)

    assert set(first) == LASTING
    assert not again


@pytest.mark.parametrize("version", ["590.1", ""])
def test_by_another_driver_or_one_that_does_not_tell_all_is_asked_again(
    node: Node, version: str
) -> None:
    before, first = node.look()
    before = dataclasses.replace(before, driver_version=version)

    assert node.look(before)[1] == first


def test_all_is_asked_again_of_a_gpu_whose_memory_is_another(node: Node) -> None:
    before, first = node.look()
    smaller = dataclasses.replace(before.gpus[0], memory_mib=before.gpus[0].memory_mib - 2048)
    look, again = node.look(dataclasses.replace(before, gpus=(smaller, *before.gpus[1:])))

    assert look == before
    assert again == {name: count // matrix.GPUS for name, count in first.items()}


def test_what_gpus_have_in_common_is_there_once(node: Node) -> None:
    look, _ = node.look()

    assert len({id(gpu.profiles) for gpu in look.gpus}) == 1


def test_what_one_gpu_tells_of_its_instances_is_known_of_all_that_are_like_it(
    tmp_path: pathlib.Path,
) -> None:
    ask = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
    mixed = matrix.Transition(
        product="A100-SXM4-40GB",
        before=({"1g.5gb": 7}, {"3g.20gb": 2}, {"1g.5gb": 7}, {"7g.40gb": 1}),
        after=({"3g.20gb": 1, "1g.5gb": 4}, {"1g.5gb": 7}, {"7g.40gb": 1}, {"3g.20gb": 2}),
    )
    matrix.prepare(mixed, tmp_path / "gpus.json")
    node = Node(tmp_path / "gpus.json")
    try:
        before, _ = node.look()
        asked = node.library.counts[ask]
        look, _ = node.look(before)
        node.gpus.execute(planner.plan(look.gpus, mixed.wanted(look.gpus)), look.gpus)
        node.look(look)

        assert node.library.counts[ask] == asked > 0
    finally:
        simulated.uninstall()


def test_gpus_are_known_by_their_uuid_wherever_they_were_counted(node: Node) -> None:
    before, _ = node.look()
    shifted = (dataclasses.replace(gpu, index=gpu.index + 1) for gpu in reversed(before.gpus))

    look, again = node.look(dataclasses.replace(before, gpus=tuple(shifted)))

    assert look == before
    assert not again
