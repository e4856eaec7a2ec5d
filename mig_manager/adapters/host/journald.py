"""Read our units' logs and the NVIDIA driver's kernel messages from journald."""

from mig_manager import errors, reasons
from mig_manager.adapters.host import programs

OF_UNITS = ("-u", "mig-manager.service", "-u", "mig-manager-boot.service")
OF_DRIVER = ("-k", "-g", "NVRM")
_MAX_LINES = 2000
_MAX_BYTES = 4 << 20


def read(tools: programs.Programs, selection: tuple[str, ...], *, timeout_s: float) -> str:
    """Return the last lines of a selection; HostError if journald is missing or refuses."""
    program = tools.find("journalctl")
    if program is None:
        raise errors.HostError("journalctl is not found", reason=reasons.Reason.INTERNAL)
    done = programs.run(
        program,
        ("--no-pager", "--quiet", "-o", "short-iso", "-n", str(_MAX_LINES), *selection),
        timeout_s=timeout_s,
        reason=reasons.Reason.INTERNAL,
        max_output_bytes=_MAX_BYTES,
    )
    # It also exits with 1 if no line matches.
    if done.status and done.stderr.strip():
        raise done.failure(reasons.Reason.INTERNAL)
    return done.stdout
