"""One D-Bus connection to the host's system bus; the only user of jeepney.

jeepney builds and parses the messages. The socket is our own, because jeepney's waits without a
deadline for the first answer of the bus.
"""

import contextlib
import dataclasses
import itertools
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Self

import jeepney
from jeepney import auth, bus

from mig_manager import errors
from mig_manager.errors import Reason

_READ_BYTES = 65536
_DENIED = frozenset(
    {
        "org.freedesktop.DBus.Error.AccessDenied",
        "org.freedesktop.DBus.Error.AuthFailed",
        "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired",
    }
)
_AS_ROOT = "run the agent as the host's root, without a security profile that blocks D-Bus"
_ANOTHER_USER = (
    "the host's D-Bus rejects the user of this process, as happens in a user namespace; run the "
    "agent outside of one"
)


class Refused(Exception):  # noqa: N818 - an answer, and not always a failure
    """The called program answered with an error.

    Attributes:
        name: D-Bus' name of it.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text.rstrip('.')} ({name})" if text else name)
        self.name = name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An interface of an object."""

    owner: str
    """The program's name on the bus."""
    path: str
    interface: str


BUS = Target(
    owner="org.freedesktop.DBus", path="/org/freedesktop/DBus", interface="org.freedesktop.DBus"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A signal that we subscribed to."""

    name: str
    body: tuple[Any, ...]


class Connection:
    """One connection with one deadline for all of its calls."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Connect.

        Args:
            address: The bus, as D-Bus writes addresses.
            timeout_s: From now until the last answer.
        """
        self._deadline_s = time.monotonic() + timeout_s
        self._parser = jeepney.Parser()
        self._serials = itertools.count(1)
        self._signals: list[Signal] = []
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(self._left_s())
            self._socket.connect(bus.get_bus(address))
            self._authenticate()
            self.call(BUS, "Hello")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(
        self, target: Target, method: str, signature: str | None = None, *body: object
    ) -> tuple[Any, ...]:
        """Call a method and return its answer.

        Raises:
            Refused: It is an error.
        """
        address = jeepney.DBusAddress(
            target.path, bus_name=target.owner, interface=target.interface
        )
        message = jeepney.new_method_call(address, method, signature, body)
        serial = next(self._serials)
        self._send(message.serialise(serial=serial))
        while True:
            answer = self._receive(self._left_s())
            if answer.header.fields.get(jeepney.HeaderFields.reply_serial) == serial:
                break
            self._keep_signal(answer)
        if answer.header.message_type is jeepney.MessageType.error:
            words = [word for word in answer.body if isinstance(word, str)]
            name = answer.header.fields[jeepney.HeaderFields.error_name]
            raise Refused(name, words[0] if words else "")
        return tuple(answer.body)

    def get(self, target: Target, name: str) -> Any:
        """Return a property.

        Raises:
            Refused: It does not exist, or we may not read it.
        """
        properties = dataclasses.replace(target, interface="org.freedesktop.DBus.Properties")
        ((_, value),) = self.call(properties, "Get", "ss", target.interface, name)
        return value

    def signals(self, *, within_s: float) -> tuple[Signal, ...]:
        """Return the signals since the last call; wait up to a time-out for the first one."""
        deadline_s = time.monotonic() + min(within_s, self._left_s())
        while not self._signals and (left_s := deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self._keep_signal(self._receive(left_s))
        signals, self._signals = tuple(self._signals), []
        return signals

    def _authenticate(self) -> None:
        """Name our user; the bus compares it with the socket's credentials."""
        self._send(b"\0")
        authenticator = auth.Authenticator(inc_null_byte=False)
        for line in authenticator:
            self._send(line)
            authenticator.feed(self._read(self._left_s()))
        self._send(auth.BEGIN)

    def _keep_signal(self, message: jeepney.Message) -> None:
        if message.header.message_type is jeepney.MessageType.signal:
            name = message.header.fields[jeepney.HeaderFields.member]
            self._signals.append(Signal(name=name, body=tuple(message.body)))

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.sendall(data)

    def _receive(self, timeout_s: float) -> jeepney.Message:
        deadline_s = time.monotonic() + timeout_s
        while True:
            message = self._parser.get_next_message()
            if message is not None:
                return message
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._parser.add_data(self._read(left_s))

    def _read(self, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the bus closed the connection")
        return data

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


@contextlib.contextmanager
def session(
    address: str, doing: str, *, timeout_s: float, failed: Reason, denied: Reason
) -> Iterator[Connection]:
    """Connect, and translate every error of the body.

    Args:
        address: The bus, as D-Bus writes addresses.
        doing: What is attempted, for the message.
        timeout_s: For everything, until the last answer.
        failed: The reason of a failure.
        denied: The reason if permission is missing.

    Raises:
        HostError: With one of the two reasons.
    """
    try:
        with Connection(address, timeout_s=timeout_s) as connection:
            yield connection
    except (
        OSError,
        Refused,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        why, is_denied = _explained(error)
        raise errors.HostError(
            f"{doing}: {why}", reason=denied if is_denied else failed
        ) from error


def _explained(error: Exception) -> tuple[str, bool]:
    """Return what went wrong, and whether permission is missing."""
    match error:
        case Refused(name=name):
            is_denied = name in _DENIED
            return f"{error}; {_AS_ROOT}" if is_denied else str(error), is_denied
        case PermissionError():
            return f"{error.strerror}; {_AS_ROOT}", True
        case TimeoutError():
            return "no answer over D-Bus in time", False
        case OSError():
            return f"D-Bus is unreachable: {error.strerror or error}", False
        case auth.AuthenticationError(data=data) if bytes(data).startswith(b"REJECTED"):
            return _ANOTHER_USER, True
        case _:
            return f"this is not D-Bus: {error}", False
