"""What containers need on the host beside the instances, brought up to date after a change."""

import pathlib

from mig_manager.adapters.host import capnodes, cdispecs, procfs
from mig_manager.core.host import hostsettings

_TIMEOUT_S = 60.0


class DeviceFiles:
    """Implements ``ports.DeviceFiles``: device nodes of instances first, then CDI specs.

    In this order, because a spec names the nodes that are there when it is made.

    Args:
        roots: Where driver, devices and the host's files are.
        is_cdi_enabled: Whether the GPU operator's containers get their GPUs by CDI.
        timeout_s: How long ``nvidia-ctk`` may take for each step.
        proc: The ``/proc`` with what the driver tells.
    """

    def __init__(
        self,
        roots: hostsettings.HostRoots,
        *,
        is_cdi_enabled: bool = False,
        timeout_s: float = _TIMEOUT_S,
        proc: pathlib.Path = procfs.ROOT,
    ) -> None:
        self._nodes = capnodes.CapabilityNodes(
            proc=proc,
            dev=roots.dev_here / "dev",
            roots=(roots.host_here, roots.driver_here),
        )
        self._specs = cdispecs.CdiSpecs(
            roots, makes_management=is_cdi_enabled, timeout_s=timeout_s
        )

    def refresh(self) -> None:
        """Bring them up to date with the GPUs; what this machine does not have is skipped.

        Raises:
            HostError: DEVICE_FILES_FAILED: a node or a spec could not be made, with what the
                system or the tool said.
        """
        self._nodes.refresh()
        self._specs.refresh()
