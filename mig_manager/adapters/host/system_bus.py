"""D-Bus: one conversation with the host's system bus. The only file that knows jeepney.

jeepney makes and reads the messages. The socket is our own, because jeepney's waits without end
for the bus' first answer.
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
_AS_ROOT = "run the agent as the host's root, and under no profile that keeps it off D-Bus"
_ANOTHER_USER = (
    "the host's D-Bus does not take this process for the user it says it is, as happens in a user "
    "namespace; run the agent outside of one"
)


class Refused(Exception):  # noqa: N818 - an answer, and not always a failure
    """The other side answered with an error.

    Attributes:
        name: D-Bus' name of it.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text.rstrip('.')} ({name})" if text else name)
        self.name = name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whom a message is for."""

    owner: str
    """Name on the bus of the program."""
    path: str
    """Of its object."""
    interface: str


BUS = Target(
    owner="org.freedesktop.DBus", path="/org/freedesktop/DBus", interface="org.freedesktop.DBus"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What a program tells those who asked to hear of it."""

    name: str
    body: tuple[Any, ...]


class Connection:
    """One connection, and one deadline for all that is done with it."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Connect.

        Args:
            address: The bus, as D-Bus writes addresses.
            timeout_s: From now on, until the last answer is here; seconds.

        Raises:
            Exception: As ``translated`` takes them.
        """
        self._ends_at = time.monotonic() + timeout_s
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
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._socket.close()

    def call(
        self, whom: Target, method: str, signature: str | None = None, *body: object
    ) -> tuple[Any, ...]:
        """Call a method and return its answer.

        Raises:
            Refused: It is an error.
        """
        address = jeepney.DBusAddress(whom.path, bus_name=whom.owner, interface=whom.interface)
        message = jeepney.new_method_call(address, method, signature, body)
        serial = next(self._serials)
        self._send(message.serialise(serial=serial))
        while True:
            answer = self._receive(self._left_s())
            if answer.header.fields.get(jeepney.HeaderFields.reply_serial) == serial:
                break
            self._note(answer)
        if answer.header.message_type is jeepney.MessageType.error:
            words = [word for word in answer.body if isinstance(word, str)]
            name = answer.header.fields[jeepney.HeaderFields.error_name]
            raise Refused(name, words[0] if words else "")
        return tuple(answer.body)

    def get(self, whom: Target, name: str) -> Any:
        """Return a property.

        Raises:
            Refused: There is none, or we may not know.
        """
        properties = dataclasses.replace(whom, interface="org.freedesktop.DBus.Properties")
        ((_, value),) = self.call(properties, "Get", "ss", whom.interface, name)
        return value

    def signals(self, *, within_s: float) -> tuple[Signal, ...]:
        """Return what came in since the last time; waits so long for something to come."""
        until = time.monotonic() + min(within_s, self._left_s())
        while not self._signals and (left_s := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self._note(self._receive(left_s))
        heard, self._signals = tuple(self._signals), []
        return heard

    def _authenticate(self) -> None:
        """Say who we are; the bus compares it with what the kernel says of the socket."""
        self._send(b"\0")
        speaker = auth.Authenticator(inc_null_byte=False)
        for said in speaker:
            self._send(said)
            speaker.feed(self._read(self._left_s()))
        self._send(auth.BEGIN)

    def _note(self, message: jeepney.Message) -> None:
        if message.header.message_type is jeepney.MessageType.signal:
            name = message.header.fields[jeepney.HeaderFields.member]
            self._signals.append(Signal(name=name, body=tuple(message.body)))

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._left_s())
        self._socket.sendall(data)

    def _receive(self, timeout_s: float) -> jeepney.Message:
        until = time.monotonic() + timeout_s
        while True:
            message = self._parser.get_next_message()
            if message is not None:
                return message
            left_s = until - time.monotonic()
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
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


@contextlib.contextmanager
def translated(doing: str, *, failed: Reason, denied: Reason) -> Iterator[None]:
    """Make errors of ours of whatever goes wrong on the bus.

    Args:
        doing: What was about to be done, for the message.
        failed: The reason if it could not be done.
        denied: The reason if we may not.

    Raises:
        HostError: For one of the two.
    """
    try:
        yield
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
    """Return what went wrong, and whether rights are missing."""
    match error:
        case Refused(name=name):
            is_denied = name in _DENIED
            return f"{error}; {_AS_ROOT}" if is_denied else str(error), is_denied
        case PermissionError():
            return f"{error.strerror}; {_AS_ROOT}", True
        case TimeoutError():
            return "no answer over D-Bus in time", False
        case OSError():
            return f"D-Bus is out of reach: {error.strerror or error}", False
        case auth.AuthenticationError(data=data) if bytes(data).startswith(b"REJECTED"):
            return _ANOTHER_USER, True
        case _:
            return f"this is no D-Bus: {error}", False
