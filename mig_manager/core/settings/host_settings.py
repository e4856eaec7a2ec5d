"""Settings of the agent for the machine: services, GPU reset, reboot, device files.

Names and variables are the same as of NVIDIA's ``nvidia-mig-manager``, if it has the option.
"""

import dataclasses
import pathlib
import urllib.parse
from typing import Any

from mig_manager.core.settings import options

_ROOT = pathlib.Path("/")
_HOST_MOUNT = pathlib.Path("/host")
"""Where the GPU operator mounts the host's root, and the default of NVIDIA's agent."""
_BUS_SOCKET = pathlib.Path("run/dbus/system_bus_socket")
_PLAIN_IN_ADDRESS = "/-_.\\*"
"""Characters that a D-Bus address need not escape, beside letters and digits."""
NVIDIAS = "options of NVIDIA's agent"
_FOLDER: Any = {"metavar": options.FOLDER, "group": NVIDIAS}
_SWITCH: Any = {"metavar": "BOOL", "is_value_optional": True}
"""A switch of NVIDIA's agent may have a value: ``--with-reboot=false``."""
_TIMEOUT: Any = {"minimum": 0.1, "group": options.TIMES}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRoots:
    """The roots of driver and devices: their paths on the host and in this process."""

    host_here: pathlib.Path  # the host's root as seen from here; ``/`` outside of containers
    driver: pathlib.Path  # root of the driver's files on the host: ``/``, or a driver container's
    driver_here: pathlib.Path
    dev: pathlib.Path  # root of the folder ``dev`` with the driver's device nodes, on the host
    dev_here: pathlib.Path
    cdi_hook: pathlib.Path | None
    """``nvidia-cdi-hook`` on the host, to name in CDI specs; None: the tool's own choice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RootOptions:
    """Options for the locations of the host's files, the driver and its device nodes."""

    nvidia_cdi_hook_path: pathlib.Path | None = options.path(
        "nvidia-cdi-hook on the host, for CDI specs",
        default_text="nvidia-ctk's choice",
        variable="NVIDIA_CDI_HOOK_PATH",
        group=NVIDIAS,
    )
    host_root_mount: pathlib.Path | None = options.path(
        "mount of the host's root: sockets of kubelet and D-Bus, driver and devices",
        default_text="/host if it exists",
        short="m",
        variable="HOST_ROOT_MOUNT",
        **_FOLDER,
    )
    nvidia_driver_root: pathlib.Path | None = options.path(
        "root of the driver's files on the host",
        default_text="/",
        short="t",
        variable="NVIDIA_DRIVER_ROOT",
        **_FOLDER,
    )
    driver_root: pathlib.Path | None = options.path(
        "root of the driver's files, where the loader does not find NVML's library",
        variable="DRIVER_ROOT",
        **_FOLDER,
    )
    driver_root_ctr_path: pathlib.Path | None = options.path(
        "root of the driver's files as seen in this container, for NVML's library and for the "
        "driver's tools",
        short="a",
        variable="DRIVER_ROOT_CTR_PATH",
        **_FOLDER,
    )
    dev_root: pathlib.Path | None = options.path(
        "root of the driver's device nodes on the host",
        default_text="the driver's",
        short="b",
        variable="NVIDIA_DEV_ROOT",
        **_FOLDER,
    )
    dev_root_ctr_path: pathlib.Path | None = options.path(
        "root of the driver's device nodes as seen in this container",
        short="j",
        variable="DEV_ROOT_CTR_PATH",
        **_FOLDER,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """How the agent may change its machine, and where; durations in seconds."""

    gpu_reset: bool = options.declare(
        options.Option(
            name="gpu-reset",
            help="reset GPUs for a new MIG mode where nvidia-smi is found",
            default_text="yes",
            parse=options.parse_switch,
            default=True,
            group=options.HOST,
        ),
        options.Option(
            name="no-gpu-reset",
            dest="gpu_reset",
            const="false",  # not False, which counts as absent
            help="never reset a GPU: fail with ResetRequired, or reboot if that is allowed",
            group=options.HOST,
        ),
    )
    dbus_address: str = options.text(
        "the host's system bus",
        metavar="ADDRESS",
        default_text="its usual socket",
        variable="DBUS_SYSTEM_BUS_ADDRESS",
        group=options.HOST,
    )
    reboot_timeout_s: float = options.seconds(
        "how long the machine may take to go down once it agreed to reboot",
        default=600.0,
        **_TIMEOUT,
    )
    service_stop_timeout_s: float = options.seconds(
        "how long each host service may take to stop; its own TimeoutStopSec= if longer",
        default=30.0,
        **_TIMEOUT,
    )
    service_start_timeout_s: float = options.seconds(
        "how long each host service may take to start", default=120.0, **_TIMEOUT
    )
    with_reboot: bool = options.switch(
        "reboot the node, once for a layout, for a MIG mode that no reset can set",
        short="r",
        variable="WITH_REBOOT",
        group=options.CHANGE,
        **_SWITCH,
    )
    shuts_host_clients: bool = options.switch(
        "stop the host services of --gpu-clients-file during a change",
        name="with-shutdown-host-gpu-clients",
        short="d",
        variable="WITH_SHUTDOWN_HOST_GPU_CLIENTS",
        group=options.CHANGE,
        **_SWITCH,
    )
    gpu_clients_file: pathlib.Path | None = options.path(
        "host services that use GPUs: 'version: v1', 'systemd-services: [NAME, ...]'",
        short="g",
        variable="GPU_CLIENTS_FILE",
        group=options.CHANGE,
    )
    cdi_enabled: bool = options.switch(
        "write the CDI specs again after a change",
        variable="CDI_ENABLED",
        group=NVIDIAS,
        **_SWITCH,
    )
    roots: HostRoots = options.declare_from(RootOptions)


def host_settings(source: options.Source) -> HostSettings:
    """Read the settings for the machine; UsageError if a value is invalid."""
    values = source.values(HostSettings)
    roots = host_roots(source)
    if not values["dbus_address"]:
        mounted = roots.host_here / _BUS_SOCKET
        path = mounted if _exists(mounted) else _ROOT / _BUS_SOCKET
        escaped = urllib.parse.quote(str(path), safe=_PLAIN_IN_ADDRESS)
        values["dbus_address"] = f"unix:path={escaped}"
    return HostSettings(**values, roots=roots)


def host_roots(source: options.Source) -> HostRoots:
    """Read the roots of driver and devices; by default they are the same."""
    named = RootOptions(**source.values(RootOptions))
    host = _host_mount(named)
    driver, driver_here = _pair(
        named.nvidia_driver_root or named.driver_root,
        named.driver_root_ctr_path,
        host=host,
        usual=(_ROOT, host),
    )
    dev, dev_here = _pair(
        named.dev_root, named.dev_root_ctr_path, host=host, usual=(driver, driver_here)
    )
    return HostRoots(
        host_here=host,
        driver=driver,
        driver_here=driver_here,
        dev=dev,
        dev_here=dev_here,
        cdi_hook=named.nvidia_cdi_hook_path,
    )


def library_roots(source: options.Source) -> tuple[str, ...]:
    """Return the roots to search for NVML's library if the loader finds none.

    These are the named roots, in the container before on the host. Without any they are the mount
    of the host's root, and our own root.
    """
    named = RootOptions(**source.values(RootOptions))
    explicit = (named.driver_root_ctr_path, named.nvidia_driver_root or named.driver_root)
    roots = [root for root in explicit if root] or [_host_mount(named), _ROOT]
    return tuple(dict.fromkeys(map(str, roots)))


def pod_resources_socket(source: options.Source) -> pathlib.Path:
    """Return kubelet's usual socket, or the one below a mount of the host's root.

    The GPU operator mounts the host's root, at NVIDIA's default, but not kubelet's folder. The
    folder decides, because the socket is missing while kubelet restarts.
    """
    usual = pathlib.Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    host = source.field(RootOptions, "host_root_mount") or _HOST_MOUNT
    below: pathlib.Path = host / usual.relative_to("/")
    return below if _exists(below.parent) and not _exists(usual.parent) else usual


def _host_mount(named: RootOptions) -> pathlib.Path:
    """Return the mount of the host's root; our own root without a mount."""
    return named.host_root_mount or (_HOST_MOUNT if _exists(_HOST_MOUNT) else _ROOT)


def _pair(
    on_host: pathlib.Path | None,
    local: pathlib.Path | None,
    *,
    host: pathlib.Path,
    usual: tuple[pathlib.Path, pathlib.Path],
) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a root's paths on the host and here; a missing one is derived from the other."""
    if on_host is None and local is None:
        return usual
    if local is None:
        local = host / str(on_host or _ROOT).lstrip("/")
    if on_host is None:
        on_host = _ROOT / local.relative_to(host) if local.is_relative_to(host) else usual[0]
    return on_host, local


def _exists(path: pathlib.Path) -> bool:
    """Return whether a path exists; a forbidden or impossible path does not."""
    try:
        return path.exists()
    except OSError:
        return False
