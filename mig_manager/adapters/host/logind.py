"""logind over D-Bus: reboot the host. Source: ``org.freedesktop.login1(5)``."""

import contextlib
import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import system_bus, systemd

_LOGIND = system_bus.Target(
    "/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.login1.Manager"
)
_ABSENT = frozenset(
    {
        "org.freedesktop.DBus.Error.NameHasNoOwner",
        "org.freedesktop.DBus.Error.ServiceUnknown",
        "org.freedesktop.DBus.Error.Spawn.ServiceNotFound",
        # The bus starts logind through systemd, which may not have its unit.
        "org.freedesktop.systemd1.LoadFailed",
        "org.freedesktop.systemd1.UnitMasked",
        systemd.UNKNOWN_UNIT,
    }
)

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class Reboot:
    """Implements ``ports.Reboot`` with logind, or with systemd on a host without logind."""

    address: str

    def check(self) -> None:
        """Raise HostError REBOOT_REQUIRED if ``request`` would be refused, as far as known."""
        with self._session("asking systemd-logind for the right to reboot") as connection:
            try:
                (answer,) = connection.call(_LOGIND, "CanReboot")
            except system_bus.CallRefused as error:
                if error.name not in _ABSENT:
                    raise
            else:
                if answer != "yes":
                    raise errors.HostError(
                        f"systemd-logind refuses to reboot the host: CanReboot is '{answer}'",
                        reason=reasons.Reason.REBOOT_REQUIRED,
                    )
                return
        with self._session("looking for systemd's reboot.target") as connection:
            connection.call(systemd.MANAGER, "LoadUnit", "s", "reboot.target")

    def request(self, why: str) -> None:
        """Request a reboot that stops services in order, and return at once.

        Raises:
            HostError: REBOOT_REQUIRED; names the program that refused it.
        """
        by = "systemd-logind"
        with self._session("requesting a reboot from systemd-logind") as connection:
            try:
                connection.call(_LOGIND, "Reboot", "b", False)  # noqa: FBT003 - not interactive
            except system_bus.CallRefused as error:
                if error.name not in _ABSENT:
                    raise
                by = "systemd"
        if by == "systemd":
            with self._session("requesting a reboot from systemd") as connection:
                # As systemctl does. The manager's own Reboot() kills services at once.
                connection.call(
                    systemd.MANAGER, "StartUnit", "ss", "reboot.target", "replace-irreversibly"
                )
        _log.warning("reboot_requested", by=by, why=why)

    def _session(self, doing: str) -> contextlib.AbstractContextManager[system_bus.Connection]:
        refused = reasons.Reason.REBOOT_REQUIRED
        return system_bus.session(
            self.address, doing, timeout_s=systemd.CALL_TIMEOUT_S, failed=refused, denied=refused
        )
