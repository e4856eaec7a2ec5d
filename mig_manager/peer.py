"""Options of NVIDIA's ``nvidia-mig-manager`` that are accepted; most of them change nothing."""

import dataclasses

from mig_manager import source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of NVIDIA's agent that is accepted and changes nothing here."""

    name: str
    short: str = ""
    variable: str
    is_switch: bool = False
    is_needed: bool = False
    """True: it asks for something that this agent does not do, which deserves a warning."""
    effect: str = ""
    """What this agent uses it for, as a line of help; empty: for nothing."""


OPTIONS = (
    Option(name="reconfigure-script", short="s", variable="RECONFIGURE_SCRIPT"),
    Option(
        name="host-root-mount",
        short="m",
        variable="HOST_ROOT_MOUNT",
        effect="where the host's files are, for kubelet's socket (default: /host)",
    ),
    Option(name="host-nvidia-dir", short="i", variable="HOST_NVIDIA_DIR"),
    Option(name="host-mig-manager-state-file", short="o", variable="HOST_MIG_MANAGER_STATE_FILE"),
    Option(
        name="host-kubelet-systemd-service", short="k", variable="HOST_KUBELET_SYSTEMD_SERVICE"
    ),
    Option(name="gpu-clients-file", short="g", variable="GPU_CLIENTS_FILE"),
    Option(
        name="default-gpu-clients-namespace",
        short="p",
        variable="DEFAULT_GPU_CLIENTS_NAMESPACE",
    ),
    Option(
        name="nvidia-driver-root",
        short="t",
        variable="NVIDIA_DRIVER_ROOT",
        effect="where to look for NVML's library as well",
    ),
    Option(name="driver-root", variable="DRIVER_ROOT"),
    Option(
        name="driver-root-ctr-path",
        short="a",
        variable="DRIVER_ROOT_CTR_PATH",
        effect="where to look for NVML's library when the loader does not find it",
    ),
    Option(name="dev-root", short="b", variable="NVIDIA_DEV_ROOT"),
    Option(name="dev-root-ctr-path", short="j", variable="DEV_ROOT_CTR_PATH"),
    Option(name="nvidia-cdi-hook-path", variable="NVIDIA_CDI_HOOK_PATH"),
    Option(name="with-reboot", short="r", variable="WITH_REBOOT", is_switch=True, is_needed=True),
    Option(
        name="with-shutdown-host-gpu-clients",
        short="d",
        variable="WITH_SHUTDOWN_HOST_GPU_CLIENTS",
        is_switch=True,
        is_needed=True,
    ),
    Option(name="cdi-enabled", variable="CDI_ENABLED", is_switch=True, is_needed=True),
)


def given_options(given: source.Source, *, is_needed: bool) -> tuple[str, ...]:
    """Return the names of those that were given, of the needed kind or of the other."""
    return tuple(
        option.name
        for option in OPTIONS
        if option.is_needed is is_needed
        and not option.effect
        and (
            given.switch(option.name, variable=option.variable)
            if option.is_switch
            else given.is_given(option.name, variable=option.variable)
        )
    )
