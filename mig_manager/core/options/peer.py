"""Options of NVIDIA's ``nvidia-mig-manager``: all are accepted; some change nothing here."""

import dataclasses

from mig_manager.core.options import source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of NVIDIA's agent."""

    name: str
    short: str = ""
    variable: str
    is_switch: bool = False
    effect: str = ""
    """What this agent uses it for, as a line of help; empty: for nothing."""


OPTIONS = (
    Option(
        name="with-reboot",
        short="r",
        variable="WITH_REBOOT",
        is_switch=True,
        effect="reboot the node, once for a layout, for a MIG mode that no reset brings about",
    ),
    Option(
        name="with-shutdown-host-gpu-clients",
        short="d",
        variable="WITH_SHUTDOWN_HOST_GPU_CLIENTS",
        is_switch=True,
        effect="stop the host's services that --gpu-clients-file names for the time of a change",
    ),
    Option(
        name="gpu-clients-file",
        short="g",
        variable="GPU_CLIENTS_FILE",
        effect="the host's services that use GPUs: 'version: v1', 'systemd-services: [NAME, ...]'",
    ),
    Option(
        name="cdi-enabled",
        variable="CDI_ENABLED",
        is_switch=True,
        effect="write the CDI specs anew after a change",
    ),
    Option(
        name="nvidia-cdi-hook-path",
        variable="NVIDIA_CDI_HOOK_PATH",
        effect="nvidia-cdi-hook on the host, for CDI specs (default: nvidia-ctk's choice)",
    ),
    Option(
        name="host-root-mount",
        short="m",
        variable="HOST_ROOT_MOUNT",
        effect="where the host's files are: kubelet's and D-Bus' sockets, driver and devices "
        "(default: /host if there is one)",
    ),
    Option(
        name="nvidia-driver-root",
        short="t",
        variable="NVIDIA_DRIVER_ROOT",
        effect="root of the driver's files on the host (default: /)",
    ),
    Option(name="driver-root", variable="DRIVER_ROOT", effect="the same"),
    Option(
        name="driver-root-ctr-path",
        short="a",
        variable="DRIVER_ROOT_CTR_PATH",
        effect="the same as seen from here: for NVML's library where the loader does not find it, "
        "and for the driver's tools",
    ),
    Option(
        name="dev-root",
        short="b",
        variable="NVIDIA_DEV_ROOT",
        effect="root of the driver's device nodes on the host (default: the driver's)",
    ),
    Option(
        name="dev-root-ctr-path",
        short="j",
        variable="DEV_ROOT_CTR_PATH",
        effect="the same as seen from here",
    ),
    Option(name="reconfigure-script", short="s", variable="RECONFIGURE_SCRIPT"),
    Option(name="host-nvidia-dir", short="i", variable="HOST_NVIDIA_DIR"),
    Option(name="host-mig-manager-state-file", short="o", variable="HOST_MIG_MANAGER_STATE_FILE"),
    Option(
        name="host-kubelet-systemd-service", short="k", variable="HOST_KUBELET_SYSTEMD_SERVICE"
    ),
    Option(
        name="default-gpu-clients-namespace",
        short="p",
        variable="DEFAULT_GPU_CLIENTS_NAMESPACE",
    ),
)


def given_options(given: source.Source) -> tuple[str, ...]:
    """Return the names of those that were given and change nothing."""
    return tuple(
        option.name
        for option in OPTIONS
        if not option.effect and given.is_given(option.name, variable=option.variable)
    )
