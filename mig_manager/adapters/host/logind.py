"""logind over D-Bus: reboot the host. Source: ``org.freedesktop.login1(5)``."""

import contextlib
import dataclasses
from typing import Any

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
        answer = self._call_logind("asking systemd-logind for the right to reboot", "CanReboot")
        if answer is None:
            with self._session("looking for systemd's reboot.target") as connection:
                connection.call(systemd.MANAGER, "LoadUnit", "s", "reboot.target")
        elif answer != ("yes",):
            raise errors.HostError(
                f"systemd-logind refuses to reboot the host: CanReboot is '{answer[0]}'",
                reason=reasons.Reason.REBOOT_REQUIRED,
            )

    def request(self, why: str) -> None:
        """Request a reboot that stops services in order, and return at once.

        Raises:
            HostError: REBOOT_REQUIRED; names the program that refused it.
        """
        by = "systemd-logind"
        doing = "requesting a reboot from systemd-logind"
        if self._call_logind(doing, "Reboot", "b", False) is None:  # noqa: FBT003 - not interactive
            by = "systemd"
            with self._session("requesting a reboot from systemd") as connection:
                # As systemctl does. The manager's own Reboot() kills services at once.
                connection.call(
                    systemd.MANAGER, "StartUnit", "ss", "reboot.target", "replace-irreversibly"
                )
        _log.warning("reboot_requested", by=by, why=why)

    def _call_logind(self, doing: str, method: str, *arguments: Any) -> tuple[Any, ...] | None:
        """Call a method of logind; None on a host without logind."""
        with self._session(doing) as connection:
            try:
                return connection.call(_LOGIND, method, *arguments)
            except system_bus.CallRefused as error:
                if error.name not in _ABSENT:
                    raise
        return None

    def _session(self, doing: str) -> contextlib.AbstractContextManager[system_bus.Connection]:
        refused = reasons.Reason.REBOOT_REQUIRED
        return system_bus.session(
            self.address, doing, timeout_s=systemd.CALL_TIMEOUT_S, failed=refused, denied=refused
        )
