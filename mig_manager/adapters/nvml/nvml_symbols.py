"""The NVML functions a plan needs, looked up in the library before the first step runs."""

import pynvml

from mig_manager import errors
from mig_manager.core import model

_MODE = ("nvmlDeviceGetMigMode", "nvmlDeviceSetMigMode")
_INSTANCES = (
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceCreateGpuInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
)
"""To create and to destroy instances: a plan that does only one of these is rolled back by the
other. The ``...WithPlacement`` functions, which R450 (for GPU instances) and R515 (for compute
instances) lack, are not among them: ``nvml_execute`` does without."""


def require(plan: model.Plan) -> None:
    """Check that the loaded library has each function that a plan and its rollback need.

    Raises:
        HardwareError: NOT_SUPPORTED, with the names of the missing functions.
    """
    needed: tuple[str, ...] = ()
    if any(isinstance(step, model.SetMode) for step in plan.steps):
        needed += _MODE
    if any(not isinstance(step, model.SetMode) for step in plan.steps):
        needed += _INSTANCES
    missing = [name for name in needed if not hasattr(pynvml.nvmlLib, name)]
    if missing:
        raise errors.HardwareError(
            f"the driver's NVML library has no {', '.join(missing)}, which this change needs",
            reason=errors.Reason.NOT_SUPPORTED,
            operation=missing[0],
        )
