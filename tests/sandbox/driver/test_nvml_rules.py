"""The driver's own choices, against sequences that were captured on hardware."""

import itertools

import pytest

from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model
from mig_manager.sandbox.driver import states, transitions
from tests.rigs.node import nvml_rig

ENUMS = {"1g": 0, "2g": 1, "3g": 2, "4g": 3, "7g": 4, "1g+me": 7, "1gR2": 9}

CAPTURES = [
    # spec, swapped, profiles in order, starts, GPU-instance ids (None: not printed)
    ("A100", False, "1g 1g 1g 1g 1g 1g 1g", [6, 4, 5, 0, 1, 2, 3], [13, 11, 12, 7, 8, 9, 10]),
    ("A100", True, "1g 1g 1g 1g 1g 1g 1g", [6, 4, 5, 0, 1, 2, 3], [9, 7, 8, 11, 12, 13, 14]),
    ("A100", False, "2g 2g 2g", [4, 0, 2], [5, 3, 4]),
    ("A100", False, "2g 2g 2g 1g+me", [4, 0, 2, 6], [5, 3, 4, 13]),
    ("A100", False, "1g 2g 4g", [6, 4, 0], [13, 5, 1]),
    ("A100", False, "3g 1g 2g 1g", [4, 0, 2, 1], [2, 7, 4, 8]),
    ("A100", False, "2g 1g 1g 1g 1g 1g", [4, 6, 0, 1, 2, 3], [5, 13, 7, 8, 9, 10]),
    ("A100", False, "1g 1g 2g 3g", [6, 4, 0, None], [13, 11, 3, None]),
    ("A100", False, "3g 3g", [4, 0], [2, 1]),
    ("A100", False, "3g 2g 1g", [4, 0, 2], [2, 3, 9]),
    ("A100", True, "3g 2g 1g 1g", [4, 0, 2, 3], [1, 5, 13, 14]),
    ("A100", True, "3g 4g", [4, 0], [1, 2]),
    ("A100", True, "2g 2g 1g", [4, 0, 6], [3, 5, 9]),
    ("A100", False, "3g 3g 1g", [4, 0, None], [2, 1, None]),
    ("GH200", False, "1g+me 1gR2 1gR2 1gR2", [6, 4, 0, 2], [13, 5, 3, 4]),
    ("H100-PCIE", False, "1gR2", [6], [6]),
    ("RTX-PRO-6000", False, "1g 1g 1g 1g", [0, 3, 6, 9], [3, 4, 5, 6]),
    ("RTX-PRO-6000", False, "2g 1g 1g", [0, 6, 9], [1, 5, 6]),
    ("A30", False, "1g 1g 2g", [0, 1, 2], [3, 4, 2]),
]


def situation(
    gpu: states.GpuState, product: str, *, is_swapped: bool = False
) -> transitions.Situation:
    options = states.Options(swapped_gpus=(0,) if is_swapped else ())
    (board,) = states.boards_of(states.first_boot(product, options))
    return transitions.Situation(board=board, gpu=gpu, clients=(), options=options, serial=1)


def enabled_gpu() -> states.GpuState:
    return states.GpuState(is_enabled=True, is_pending=True)


def gpu_with_instance(product: str, profile_id: int) -> states.GpuState:
    return transitions.create_gpu_instance(situation(enabled_gpu(), product), profile_id, None)[0]


def with_compute(
    gpu: states.GpuState, profile_id: int
) -> tuple[states.GpuState, states.ComputeInstance]:
    now = situation(gpu, "A100")
    return transitions.create_compute_instance(now, gpu.instances[0], profile_id, None)


def room(gpu: states.GpuState, product: str, row: product_table.GpuProfile) -> int:
    """Return how many more instances of a profile the driver creates."""
    for count in itertools.count():
        try:
            gpu, _ = transitions.create_gpu_instance(situation(gpu, product), row.profile_id, None)
        except states.Refused as refused:
            assert refused.code is states.Code.INSUFFICIENT_RESOURCES  # noqa: PT017
            return count
    raise AssertionError


def profile_id_of(product: str, name: str) -> int:
    rows = hardware.find(product).profiles
    return next(row.profile_id for row in rows if row.enum_index == ENUMS[name])


@pytest.mark.parametrize(
    ("product", "is_swapped", "order", "starts", "ids"),
    CAPTURES,
    ids=[f"{c[0]}{'-swapped' * c[1]}-{c[2].replace(' ', ',')}" for c in CAPTURES],
)
def test_driver_positions_and_numbers_instances_as_captured(
    *, product: str, is_swapped: bool, order: str, starts: list[int | None], ids: list[int | None]
) -> None:
    gpu = enabled_gpu()
    positions: list[tuple[int | None, int | None]] = []
    for name in order.split():
        now = situation(gpu, product, is_swapped=is_swapped)
        try:
            gpu, made = transitions.create_gpu_instance(now, profile_id_of(product, name), None)
            positions.append((made.placement.start, made.instance_id))
        except states.Refused as refused:
            assert refused.code is states.Code.INSUFFICIENT_RESOURCES  # noqa: PT017
            positions.append((None, None))
    assert positions == list(zip(starts, ids, strict=True))


def test_each_profile_can_be_created_to_its_maximum_and_no_further() -> None:
    for product in nvml_rig.MIG_CAPABLE:
        room_of_each = [room(enabled_gpu(), product.key, row) for row in product.profiles]
        assert room_of_each == [row.max_instances for row in product.profiles], product.key


@pytest.mark.parametrize("is_swapped", [False, True])
def test_ids_of_disjoint_placements_differ(*, is_swapped: bool) -> None:
    for product in nvml_rig.MIG_CAPABLE:
        placements = {place for row in product.profiles for place in row.placements}
        ids = {
            transitions.gpu_instance_id(product, place, is_swapped=is_swapped)
            for place in placements
        }
        assert len(ids) == len(placements), product.key
        assert ids <= {*range(15)}


@pytest.mark.parametrize(("name", "spans"), [("3g", ["0:2", "2:1"]), ("4g", ["0:1", "2:2"])])
def test_small_compute_instance_leaves_room_for_a_double_one(name: str, spans: list[str]) -> None:
    gpu = gpu_with_instance("A100", profile_id_of("A100", name))
    for desired in (0, 1):
        gpu, _ = with_compute(gpu, desired)
    assert sorted(str(c.placement) for c in gpu.instances[0].compute_instances) == spans


def test_compute_instances_take_the_lowest_free_id() -> None:
    gpu = gpu_with_instance("A100", 0)
    for _ in range(3):
        gpu, _ = with_compute(gpu, 0)
    (parent,) = gpu.instances
    second = parent.compute_instances[1]
    gpu = transitions.destroy_compute_instance(situation(gpu, "A100"), parent, second)
    gpu, made = with_compute(gpu, 0)
    assert made.instance_id == 1
    assert [c.instance_id for c in gpu.instances[0].compute_instances] == [0, 1, 2]


@pytest.mark.parametrize(
    ("product", "first", "expected"),
    [
        ("RTX-PRO-6000", 65, {"1g.24gb-me": 3, "2g.48gb-me": 1}),
        ("A30", 21, {"1g.6gb": 3, "2g.12gb": 1}),
    ],
)
def test_instance_with_all_media_engines_leaves_room_without_any(
    product: str, first: int, expected: dict[str, int]
) -> None:
    gpu = gpu_with_instance(product, first)
    rooms = {row.name: room(gpu, product, row) for row in hardware.find(product).profiles}
    assert {name: count for name, count in rooms.items() if count} == expected


def test_compute_instances_of_a_gpu_never_share_a_graphics_engine() -> None:
    for product in nvml_rig.MIG_CAPABLE:
        rows = [row for row in product.profiles if row.enum_index == 0]
        engines = [
            states.physical_engine(product, place, model.Placement(0, 1))
            for place in rows[0].placements
        ]
        assert len(set(engines)) == rows[0].max_instances
