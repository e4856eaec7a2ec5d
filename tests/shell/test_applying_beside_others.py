"""``apply`` beside instances that another program created, or that a driver listed too late."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from tests import gpu_values
from tests.shell.applying_rig import Gpus, Node


@pytest.fixture
def node() -> Node:
    return Node()


def with_foreign(gpus: Gpus, start: int) -> model.Placement:
    """Create an instance of one slice on the first GPU, as another program does."""
    spec = next(p for p in gpus.gpus[0].profiles or () if str(p.profile) == "1g.5gb")
    place = next(place for place in spec.placements if place.start == start)
    for step in (
        steps.CreateGpuInstance(
            gpu_uuid=gpus.gpus[0].uuid,
            profile=spec.profile,
            profile_id=spec.profile_id,
            placement=place,
        ),
        steps.CreateComputeInstance(
            gpu_uuid=gpus.gpus[0].uuid,
            gpu_instance_placement=place,
            profile=spec.profile,
            placement=model.Placement(0, 1),
        ),
    ):
        gpus.gpus = (gpu_values.apply_step(gpus.gpus[0], step), *gpus.gpus[1:])
    return place


class MissingOne(Gpus):
    """The first observation misses an instance, as on a driver that lists too few."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.missed: model.Placement | None = None

    def observe(self) -> model.ObservedGpus:
        self.looks += 1
        first, *others = super().observe()
        if self.looks == 1 and self.missed:
            seen = tuple(gi for gi in first.gpu_instances if gi.placement != self.missed)
            first = dataclasses.replace(first, gpu_instances=seen)
        return model.ObservedGpus((first, *others))


@pytest.fixture
def missing() -> Node:
    """GPUs with 2g.10gb and 3g.20gb; the next observation misses an instance of the first."""
    gpus = MissingOne()
    node = Node(gpus=gpus)
    gpus.missed = with_foreign(gpus, start=2)
    gpus.looks = gpus.steps = 0
    gpus.fails = lambda step: (
        isinstance(step, steps.CreateGpuInstance) and step.placement == gpus.missed
    )
    return node


def test_a_rollback_names_and_keeps_an_instance_that_the_first_check_missed(
    missing: Node,
) -> None:
    before = missing.shape

    with pytest.raises(errors.HardwareError) as caught:
        missing.change_to("wanted")

    assert missing.shape == before
    assert caught.value.reason is errors.Reason.VERIFY_FAILED
    assert "1g.5gb at 2:1 on GPU 0 was not there before, and is kept" in caught.value.message
    assert missing.journal.text is not None


def test_a_missed_instance_is_part_of_the_next_change(missing: Node) -> None:
    with pytest.raises(errors.HardwareError):
        missing.change_to("wanted")
    before = missing.shape

    refused: list[steps.Step] = []

    def fails(step: steps.Step) -> bool:
        if isinstance(step, steps.CreateGpuInstance) and step.profile.gpu_slices == 7:
            refused.append(step)
        return len(refused) == 2 and refused[-1] is step

    missing.gpus.fails = fails
    with pytest.raises(errors.HardwareError, match="the instances from before are back"):
        missing.change_to("other")

    assert missing.shape == before
    assert missing.journal.text is None
    missing.gpus.fails = lambda _step: False
    missing.change_to("other")
    assert missing.has("other")


def test_an_instance_that_someone_creates_during_a_change_is_named_and_kept(node: Node) -> None:
    placements: list[model.Placement] = []

    def create(step: steps.Step) -> bool:
        if isinstance(step, steps.CreateGpuInstance) and not placements:
            placements.append(with_foreign(node.gpus, start=3))
            return True
        return False

    node.gpus.fails = create
    with pytest.raises(errors.HardwareError, match=r"1g\.5gb at 3:1 on GPU 0 was not") as caught:
        node.change_to("wanted")

    assert caught.value.reason is errors.Reason.VERIFY_FAILED
    assert placements[0] in {gi.placement for gi in node.gpus.gpus[0].gpu_instances}
    assert node.journal.text is not None


def test_after_a_kill_only_what_the_change_created_is_removed(node: Node) -> None:
    before = node.shape
    assert node.cut_off("wanted", at=4)
    place = with_foreign(node.gpus, start=3)

    with pytest.raises(errors.LayoutError, match=r"1g\.5gb at 3:1 on GPU 0 was not there before"):
        node.change_to("too-much")

    first = node.gpus.gpus[0]
    assert place in {gi.placement for gi in first.gpu_instances}
    others = tuple(gi for gi in first.gpu_instances if gi.placement != place)
    node.gpus.gpus = (dataclasses.replace(first, gpu_instances=others), *node.gpus.gpus[1:])
    assert node.shape == before
    assert node.journal.text is not None

    # Once that instance is removed, the layout is applied.
    with pytest.raises(errors.LayoutError, match=r"too-much|fit"):
        node.change_to("too-much")
    assert node.journal.text is None


def test_a_plan_that_has_become_stale_is_given_up_before_its_first_step(node: Node) -> None:
    before = node.shape
    node.gpus.is_stale, node.gpus.steps = True, 0

    with pytest.raises(errors.StalePlanError, match="already; nothing was changed") as caught:
        node.change_to("wanted")

    assert caught.value.reason.is_transient
    assert (node.gpus.steps, node.shape, node.journal.text) == (0, before, None)
    node.change_to("wanted")
    assert node.has("wanted")


def test_beside_an_older_change_a_stale_plan_leaves_alone_what_it_would_have_created(
    node: Node,
) -> None:
    assert node.cut_off("wanted", at=4)
    place = with_foreign(node.gpus, start=3)
    node.gpus.is_stale = True

    with pytest.raises(
        errors.HardwareError, match=r"1g\.5gb at 3:1 on GPU 0 was not there before"
    ):
        node.change_to("other")

    assert place in {gi.placement for gi in node.gpus.gpus[0].gpu_instances}
    assert node.journal.text is not None
