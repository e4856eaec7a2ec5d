"""The errors of calls that fail."""

from mig_manager import errors, reasons


def broken(call: str) -> Exception:
    """Return what a port call raises that fails."""
    return _BROKEN.get(call) or _BROKEN[call.partition(".")[0]]


REFUSED = errors.HardwareError("no", reason=reasons.Reason.INSUFFICIENT_RESOURCES)
"""What the driver answers to a step that it refuses."""
IN_USE = errors.HardwareError("in use", reason=reasons.Reason.IN_USE)
"""What it answers to a step while the instance is in use."""
NO_DRIVER = errors.HardwareError("gone", reason=reasons.Reason.DRIVER_NOT_LOADED)
_BROKEN = {
    "gpus": errors.HardwareError("broken", reason=reasons.Reason.NVML_ERROR),
    "verified_layout_file": errors.ConfigError("broken"),
    "host_copy_file": errors.ConfigError("broken"),
    **dict.fromkeys(
        ("services", "reset", "reboot", "refresh_files"),
        errors.HostError("broken", reason=reasons.Reason.HOST_SERVICE_FAILED),
    ),
    "hooks": errors.HostError("broken", reason=reasons.Reason.HOOK_FAILED),
    "node": errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=503),
    "workloads": errors.ClusterError("broken", reason=reasons.Reason.FORBIDDEN, status=403),
    "allocations": errors.KubeletError("broken"),
    "slices": errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=503),
    "slots": errors.ClusterError("broken", reason=reasons.Reason.API_UNAVAILABLE, status=503),
    "slots.check": errors.NotReadyError("broken", reason=reasons.Reason.SLOTS_TAKEN),
}
