"""What a difference means for the owner of a GPU."""

import enum
from collections.abc import Mapping


class Effect(enum.Enum):
    """What a difference affects."""

    NONE = "none"
    SIMULATION = "simulation"
    """``--simulate``, ``demo`` and ``validate --gpu``, which use the catalogue."""
    CHANGES = "changes"  # layouts on this GPU


class Subject(enum.Enum):
    """What differs; the value is in the answer."""

    PRODUCT = "product"
    UNREACHABLE = "unreachable"
    FAULT = "fault"
    NAME = "name"
    ARCHITECTURE = "architecture"
    MEMORY = "memory"
    MIG = "mig"
    MODE_CHANGE = "mode-change"
    WITHHELD = "profiles-withheld"
    PROFILE_MISSING = "profile-missing"
    PROFILE_ADDED = "profile-added"
    PROFILE_NAME = "profile-name"
    PROFILE_ID = "profile-id"
    SLICES = "slices"
    PROFILE_MEMORY = "profile-memory"
    MULTIPROCESSORS = "multiprocessors"
    CAPACITY = "instance-capacity"
    ENGINES = "engines"
    PLACEMENT_MISSING = "placement-missing"
    PLACEMENT_ADDED = "placement-added"
    COMPUTE_PROFILES = "compute-profiles"
    INSTANCE_ID = "instance-id"
    RULE = "rule"
    ANSWER = "answer"
    FUNCTION = "function"
    FABRIC = "fabric"
    COURSE = "course"


_WAITS = (
    "CUDA on the whole GPU fails until the Fabric Manager has registered it. MIG devices do not "
    "use NVLink."
)
FABRIC: Mapping[str, str] = {
    "not-started": _WAITS,
    "in-progress": _WAITS,
    "failed": _WAITS,
    "completed": (
        "MIG devices do not use NVLink. After a reset, and after MIG is disabled, CUDA on the "
        "whole GPU fails until the Fabric Manager has registered it again."
    ),
}
"""What the state of an NVSwitch fabric means; see ``docs/reconfiguration.md``, "Resets"."""

USUAL: Mapping[Subject, tuple[Effect, str]] = {
    Subject.COURSE: (
        Effect.CHANGES,
        "Such a change fails on this GPU, and is rolled back.",
    ),
    Subject.PRODUCT: (
        Effect.SIMULATION,
        (
            "'--simulate' and 'validate --gpu' do not know this product. Layouts on the GPU are "
            "unaffected: the driver reports what it needs. Send the file, so that it can be added."
        ),
    ),
    Subject.UNREACHABLE: (
        Effect.CHANGES,
        "mig-manager reports this GPU as unreachable and changes nothing on it.",
    ),
    Subject.FAULT: (
        Effect.CHANGES,
        (
            "Changes of this GPU may fail, and its answers may be wrong. 'mig-manager status' "
            "says what to do; then run this command again."
        ),
    ),
    Subject.NAME: (
        Effect.SIMULATION,
        "'validate --gpu' does not know this name. Device filters use the PCI id.",
    ),
    Subject.ARCHITECTURE: (
        Effect.CHANGES,
        (
            "mig-manager uses it to decide whether a MIG mode change resets the GPU, if the "
            "driver does not report that."
        ),
    ),
    Subject.MEMORY: (
        Effect.NONE,
        "Layouts are unaffected, unless a profile has another name, which is listed then.",
    ),
    Subject.MIG: (Effect.CHANGES, "Layouts with MIG cannot be applied to this GPU."),
    Subject.MODE_CHANGE: (
        Effect.SIMULATION,
        (
            "Plans and drains follow the driver. The demo shows a reset where there is none, or "
            "none where there is one."
        ),
    ),
    Subject.WITHHELD: (
        Effect.CHANGES,
        (
            "Layouts cannot be checked before MIG is enabled. Run this command as root; drivers "
            "R535 and older list no profiles while MIG is off."
        ),
    ),
    Subject.PROFILE_MISSING: (
        Effect.SIMULATION,
        (
            "'validate --gpu' and the demo accept layouts with it. On this GPU they fail with "
            "UnknownProfile before any change."
        ),
    ),
    Subject.PROFILE_ADDED: (
        Effect.SIMULATION,
        "This GPU accepts layouts with it. 'validate --gpu' and the demo refuse them.",
    ),
    Subject.PROFILE_NAME: (
        Effect.SIMULATION,
        "Layouts for this GPU must use its own name. 'validate --gpu' knows the other.",
    ),
    Subject.PROFILE_ID: (
        Effect.NONE,
        "Layouts are unaffected: profiles are resolved by name.",
    ),
    Subject.SLICES: (
        Effect.SIMULATION,
        "'validate --gpu' and the demo count other slices than this GPU has.",
    ),
    Subject.PROFILE_MEMORY: (
        Effect.NONE,
        (
            "Layouts are unaffected: profiles are resolved by name, and drivers report slightly "
            "different sizes."
        ),
    ),
    Subject.MULTIPROCESSORS: (Effect.NONE, "Layouts are unaffected."),
    Subject.CAPACITY: (
        Effect.NONE,
        "Layouts are unaffected: placements decide how many instances fit.",
    ),
    Subject.ENGINES: (
        Effect.SIMULATION,
        (
            "'validate --gpu' and the demo may accept combinations that this GPU refuses before "
            "any change, or refuse others that it accepts."
        ),
    ),
    Subject.PLACEMENT_MISSING: (
        Effect.SIMULATION,
        "'validate --gpu' and the demo accept layouts that this GPU refuses before any change.",
    ),
    Subject.PLACEMENT_ADDED: (
        Effect.SIMULATION,
        "'validate --gpu' and the demo refuse layouts that this GPU accepts.",
    ),
    Subject.COMPUTE_PROFILES: (
        Effect.CHANGES,
        (
            "Layouts that divide a GPU instance, such as 1c.3g.20gb, may fail on this GPU and are "
            "then rolled back."
        ),
    ),
    Subject.INSTANCE_ID: (
        Effect.NONE,
        "Layouts are unaffected: instances are identified by placement.",
    ),
    Subject.FABRIC: (Effect.NONE, FABRIC["in-progress"]),
    Subject.RULE: (
        Effect.CHANGES,
        (
            "mig-manager relies on it to identify GPUs and MIG devices. Do not change this GPU "
            "with it; report the file."
        ),
    ),
}
ORDER_RULE = "in the order of"
ORDER = "Layouts are unaffected: MIG devices are found by their instances, in any order."
HANDLED = "mig-manager handles this answer, too."
UNHANDLED = "mig-manager does not expect this answer: an operation may fail with it."
FUNCTIONS = {
    "nvmlDeviceGetArchitecture": "The GPU counts as a generation without resets.",
    "nvmlDeviceGetFieldValues": "mig-manager decides by generation whether a mode change resets.",
    "nvmlDeviceGetMinorNumber": "Errors of hung calls do not name the processes of the GPU.",
    "nvmlDeviceGetVirtualizationMode": "The GPU counts as one of bare metal.",
    "nvmlDeviceRegisterEvents": "Drift is found at the next periodic check, not at once.",
}
LOST = "A GPU is unreachable, as named below."
WORKS = "mig-manager observed the GPU in spite of it."
