"""What one look at the GPUs finds out, for the change that follows it."""

import pathlib

import pytest

from bench import matrix
from mig_manager.adapters.host import clock
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.core.planner import planner
from mig_manager.sandbox.driver import library as simulated
from testkit import nvml_faults

MIXED = matrix.Transition(
    product="A100-SXM4-40GB",
    before=({"1g.5gb": 7}, {"3g.20gb": 2}, {"1g.5gb": 7}, {"7g.40gb": 1}),
    after=({"3g.20gb": 1, "1g.5gb": 4}, {"1g.5gb": 7}, {"7g.40gb": 1}, {"3g.20gb": 2}),
)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    matrix.prepare(MIXED, tmp_path / "gpus.json")
    return tmp_path / "gpus.json"


def test_what_gpus_have_in_common_is_there_once(path: pathlib.Path) -> None:
    nvml_faults.install(path)
    try:
        gpus = nvml_gpus.NvmlGpus(clock=clock.SystemClock()).observe()
    finally:
        simulated.uninstall()

    assert len(gpus) == len(MIXED.before)
    assert len({id(gpu.profiles) for gpu in gpus}) == 1


def test_what_one_gpu_reports_of_its_instances_is_known_of_all_like_it(
    path: pathlib.Path,
) -> None:
    ask = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
    library = nvml_faults.install(path)
    try:
        gpus = nvml_gpus.NvmlGpus(clock=clock.SystemClock())
        seen = gpus.observe()
        asked = library.counts[ask]
        gpus.execute(planner.plan(seen, MIXED.wanted(seen)), seen)

        assert library.counts[ask] == asked > 0
    finally:
        simulated.uninstall()
