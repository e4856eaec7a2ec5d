"""Settings of the agent for the machine underneath: services, reset, reboot, device files.

Names and variables are those of NVIDIA's ``nvidia-mig-manager`` wherever it has one.
"""

import dataclasses
import pathlib
import urllib.parse

from mig_manager.core.options import source

_ROOT = pathlib.Path("/")
_HOST_MOUNT = pathlib.Path("/host")
"""Where the GPU operator mounts the host's root, and the default of NVIDIA's agent."""
_BUS_SOCKET = pathlib.Path("run/dbus/system_bus_socket")
_PLAIN_IN_ADDRESS = "/-_.\\*"
"""What a D-Bus address need not escape, beside letters and digits (D-Bus specification)."""
_LEAST_PATIENCE_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRoots:
    """Where driver and devices are; each as the host names it and as this process sees it."""

    host_here: pathlib.Path
    """The host's root as seen from here; ``/`` outside of containers."""
    driver: pathlib.Path
    """Root of the driver's files on the host: ``/``, or a driver container's."""
    driver_here: pathlib.Path
    dev: pathlib.Path
    """Root of the folder ``dev`` with the driver's device nodes, on the host."""
    dev_here: pathlib.Path
    cdi_hook: pathlib.Path | None
    """``nvidia-cdi-hook`` on the host, to name in CDI specs; None: the tool's own choice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What the agent may do to its machine, and where; durations in seconds."""

    roots: HostRoots
    with_reboot: bool
    """Whether the machine may be rebooted for a MIG mode that no reset brings about."""
    gpu_reset: bool
    """Whether GPUs may be reset for a new MIG mode."""
    cdi_enabled: bool
    """Whether containers get their GPUs by CDI, whose specs must then follow each change."""
    shuts_host_clients: bool
    """Whether the services of the clients file are stopped for a change."""
    gpu_clients_file: pathlib.Path | None
    """The operator's list of services of the host that use GPUs; None: there are none."""
    dbus_address: str
    """The system bus of the host, as D-Bus writes addresses."""
    reboot_timeout_s: float
    """How long a machine that agreed to reboot may take until it ends this process."""
    service_stop_timeout_s: float
    """How long each service may take to stop."""
    service_start_timeout_s: float
    """How long each service may take to start."""


def host_settings(given: source.Source) -> HostSettings:
    """Read what concerns the machine.

    Raises:
        UsageError: A value cannot be used.
    """
    roots = host_roots(given)
    return HostSettings(
        roots=roots,
        with_reboot=given.switch("with-reboot", variable="WITH_REBOOT"),
        gpu_reset=given.switch("gpu-reset", default=True),
        cdi_enabled=given.switch("cdi-enabled", variable="CDI_ENABLED"),
        shuts_host_clients=given.switch(
            "with-shutdown-host-gpu-clients", variable="WITH_SHUTDOWN_HOST_GPU_CLIENTS"
        ),
        gpu_clients_file=given.path("gpu-clients-file", variable="GPU_CLIENTS_FILE"),
        dbus_address=given.text("dbus-address", variable="DBUS_SYSTEM_BUS_ADDRESS")
        or _bus_address(roots.host_here),
        reboot_timeout_s=given.seconds("reboot-timeout-s", default=600.0, least=_LEAST_PATIENCE_S),
        service_stop_timeout_s=given.seconds(
            "service-stop-timeout-s", default=30.0, least=_LEAST_PATIENCE_S
        ),
        service_start_timeout_s=given.seconds(
            "service-start-timeout-s", default=120.0, least=_LEAST_PATIENCE_S
        ),
    )


def host_roots(given: source.Source) -> HostRoots:
    """Read where driver and devices are; the devices are with the driver unless told."""
    host = _host_mount(given)
    driver, driver_here = _pair(
        _driver_root(given),
        given.path("driver-root-ctr-path", variable="DRIVER_ROOT_CTR_PATH"),
        host=host,
        usual=(_ROOT, host),
    )
    dev, dev_here = _pair(
        given.path("dev-root", variable="NVIDIA_DEV_ROOT"),
        given.path("dev-root-ctr-path", variable="DEV_ROOT_CTR_PATH"),
        host=host,
        usual=(driver, driver_here),
    )
    return HostRoots(
        host_here=host,
        driver=driver,
        driver_here=driver_here,
        dev=dev,
        dev_here=dev_here,
        cdi_hook=given.path("nvidia-cdi-hook-path", variable="NVIDIA_CDI_HOOK_PATH"),
    )


def library_roots(given: source.Source) -> tuple[str, ...]:
    """Return where to look for the driver's library where the loader finds none.

    Those are the roots that are named: as seen in a container before as seen on the host. Where
    none is named they are the host's root, if it is mounted, and our own.
    """
    named = (
        given.path("driver-root-ctr-path", variable="DRIVER_ROOT_CTR_PATH"),
        _driver_root(given),
    )
    roots = [root for root in named if root] or [_host_mount(given), _ROOT]
    return tuple(dict.fromkeys(map(str, roots)))


def pod_resources_socket(given: source.Source) -> pathlib.Path:
    """Return kubelet's socket where it usually is, or below a mount of the host's root.

    The GPU operator mounts the host's root, at NVIDIA's default, and not kubelet's folder. The
    folder decides and not the socket, which is away while kubelet restarts.
    """
    usual = pathlib.Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    host = given.path("host-root-mount", variable="HOST_ROOT_MOUNT") or _HOST_MOUNT
    below = host / usual.relative_to("/")
    return below if _is_there(below.parent) and not _is_there(usual.parent) else usual


def _host_mount(given: source.Source) -> pathlib.Path:
    """Return where the host's root is mounted; our own root where it is not."""
    mount = given.path("host-root-mount", variable="HOST_ROOT_MOUNT")
    return mount or (_HOST_MOUNT if _is_there(_HOST_MOUNT) else _ROOT)


def _driver_root(given: source.Source) -> pathlib.Path | None:
    """Return the driver's root on the host; mig-parted has two names for the one option."""
    return given.path("nvidia-driver-root", variable="NVIDIA_DRIVER_ROOT") or given.path(
        "driver-root", variable="DRIVER_ROOT"
    )


def _pair(
    on_host: pathlib.Path | None,
    here: pathlib.Path | None,
    *,
    host: pathlib.Path,
    usual: tuple[pathlib.Path, pathlib.Path],
) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a root on the host and as seen here; where one is given, it tells the other."""
    if on_host is None and here is None:
        return usual
    if here is None:
        here = _below(host, on_host or _ROOT)
    if on_host is None:
        on_host = _ROOT / here.relative_to(host) if here.is_relative_to(host) else usual[0]
    return on_host, here


def _below(root: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Return a path of another root, absolute or not."""
    return root / str(path).lstrip("/")


def _is_there(path: pathlib.Path) -> bool:
    """Return whether a path exists; one that we may not look at, or that cannot be, does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _bus_address(host: pathlib.Path) -> str:
    """Return the host's bus below a mount of its root, or where systemd has it."""
    mounted = host / _BUS_SOCKET
    path = mounted if _is_there(mounted) else _ROOT / _BUS_SOCKET
    return f"unix:path={urllib.parse.quote(str(path), safe=_PLAIN_IN_ADDRESS)}"
