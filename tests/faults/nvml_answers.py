"""Answers of NVML that a run may survive, as data; any other one makes it fail."""

from collections.abc import Mapping, Sequence

from mig_manager.reasons import Reason
from tests.rigs.driver import nvml_codes
from tests.rigs.driver.nvml_codes import (
    IN_USE,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
)

_ROWS: Sequence[tuple[Sequence[str], Sequence[int], Sequence[Reason]]] = (
    (
        # Without a list of the processes the change goes on: the driver refuses to destroy what
        # is in use.
        (
            *("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetUUID"),
            *("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetHandleByIndex_v2"),
            *("nvmlDeviceGetMinorNumber", "nvmlSystemGetProcessName"),
        ),
        (),
        (),
    ),
    (
        # What was done in a session stays done if the session cannot be closed.
        ("nvmlShutdown",),
        (),
        (),
    ),
    (
        # The GPU has no MIG; another one of the node may have.
        ("nvmlDeviceGetMigMode",),
        [NOT_SUPPORTED],
        [Reason.NOT_MIG_CAPABLE, Reason.NOT_ALLOCATABLE],
    ),
    (
        # The generation of the GPU shows as well whether it must be reset.
        ("nvmlDeviceGetFieldValues",),
        [INVALID_ARGUMENT],
        (),
    ),
    (
        # The GPU has no memory of its own to name profiles by.
        ("nvmlDeviceGetMemoryInfo",),
        [NOT_SUPPORTED],
        [Reason.NOT_SUPPORTED],
    ),
    (
        # There is no such profile.
        ("nvmlDeviceGetGpuInstanceProfileInfo",),
        [NOT_SUPPORTED, INVALID_ARGUMENT],
        [Reason.UNKNOWN_PROFILE, Reason.VERIFY_FAILED, Reason.IN_USE],
    ),
    (
        ("nvmlGpuInstanceGetComputeInstanceProfileInfo",),
        [NOT_SUPPORTED, INVALID_ARGUMENT],
        [Reason.NOT_SUPPORTED, Reason.VERIFY_FAILED],
    ),
    (
        # The driver reports no profiles while MIG is off, or not to every caller.
        (
            "nvmlDeviceGetGpuInstanceProfileInfo",
            "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        ),
        [NO_PERMISSION],
        [Reason.UNKNOWN_PROFILE],
    ),
    (
        ("nvmlDeviceGetGpuInstancePossiblePlacements_v2",),
        [NOT_SUPPORTED],
        (),
    ),
    (
        # There is none of this profile, or it has gone already.
        (
            *("nvmlDeviceGetGpuInstances", "nvmlDeviceGetGpuInstanceById"),
            *("nvmlGpuInstanceGetComputeInstances", "nvmlGpuInstanceGetComputeInstanceById"),
        ),
        [NOT_FOUND],
        [Reason.IN_USE, Reason.INSUFFICIENT_RESOURCES, Reason.VERIFY_FAILED],
    ),
    (
        # The driver does not report it: the rules of the open kernel modules count.
        ("nvmlGpuInstanceGetComputeInstancePossiblePlacements",),
        [NOT_SUPPORTED, INVALID_ARGUMENT],
        (),
    ),
    (
        # There is no MIG device at this index.
        ("nvmlDeviceGetMigDeviceHandleByIndex",),
        [NOT_FOUND, INVALID_ARGUMENT],
        [Reason.NOT_ALLOCATABLE],
    ),
    (
        # This driver can only choose the placement itself, and then may choose the right one.
        (
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
        ),
        [NOT_SUPPORTED],
        [Reason.NOT_SUPPORTED],
    ),
    (
        # It is in use; the process may end.
        tuple(nvml_codes.CHANGES),
        [IN_USE],
        (),
    ),
)
"""Functions, codes (none: all), and reasons; a comment in the row says why."""

PLAUSIBLE: Mapping[tuple[str, int], Sequence[Reason]] = {
    (function, code): reasons
    for functions, codes, reasons in _ROWS
    for function in functions
    for code in codes or nvml_codes.codes_of(function)
}
"""Answers that may be true: a run may recover from them, or fail with one of the reasons."""

STALE = {
    (function, code)
    for function in (
        *("nvmlComputeInstanceGetInfo_v2", "nvmlDeviceGetComputeInstanceId"),
        *("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetGpuInstancePossiblePlacements_v2"),
        *("nvmlDeviceGetGpuInstances", "nvmlDeviceGetMigDeviceHandleByIndex"),
        *("nvmlGpuInstanceGetComputeInstanceProfileInfo", "nvmlGpuInstanceGetComputeInstances"),
        "nvmlGpuInstanceGetInfo",
    )
    for code in (NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED)
}
"""Answers as of an instance that another program has just removed: the GPU is observed again."""

NO_MIG = ("nvmlDeviceGetMigMode", NOT_SUPPORTED)
"""With ``devices: all`` a GPU that says so is left out, and the others have the layout."""

HIDING = (
    ("nvmlDeviceGetGpuInstanceProfileInfo", NOT_SUPPORTED),
    ("nvmlDeviceGetGpuInstanceProfileInfo", INVALID_ARGUMENT),
    ("nvmlDeviceGetGpuInstances", NOT_FOUND),
    ("nvmlGpuInstanceGetComputeInstances", NOT_FOUND),
)
"""Answers that hide an instance. What the first read missed blocks the MIG mode change, and
no rollback restores it."""
