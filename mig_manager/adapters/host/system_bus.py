"""One D-Bus connection to the host's system bus; the only user of jeepney.

jeepney builds and parses the messages. The socket is our own, because jeepney's waits without a
deadline for the first answer of the bus.
"""

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Self, TypeAlias

import jeepney
from jeepney import auth, bus

from mig_manager import errors, reasons

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


class CallRefused(Exception):  # noqa: N818 - an answer, and not always a failure
    """The called program answered with an error.

    Attributes:
        name: The error's name on D-Bus.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{text.rstrip('.')} ({name})" if text else name)
        self.name = name


Target: TypeAlias = jeepney.DBusAddress
"""An interface of an object: the object's path, its program's name on the bus, the interface."""
Signal = tuple[str, tuple[Any, ...]]
BUS = Target("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")


class Connection:
    """One connection with one deadline for all of its calls."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """Connect; ``timeout_s`` covers all until the last answer."""
        self._deadline_s = time.monotonic() + timeout_s
        self._parser = jeepney.Parser()
        self._serials = itertools.count(1)
        self._signals: list[Signal] = []
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(self._remaining_s())
            self._socket.connect(bus.get_bus(address))
            # Names our user; the bus compares it with the socket's credentials.
            self._send(b"\0")
            authenticator = auth.Authenticator(inc_null_byte=False)
            for line in authenticator:
                self._send(line)
                authenticator.feed(self._read(self._remaining_s()))
            self._send(auth.BEGIN)
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
        """Call a method and return its answer; CallRefused if the answer is an error."""
        return self._answer(jeepney.new_method_call(target, method, signature, body))

    def get(self, target: Target, name: str) -> Any:
        """Return a property; CallRefused if it does not exist, or we may not read it."""
        ((_, value),) = self._answer(jeepney.Properties(target).get(name))
        return value

    def signals(self, *, within_s: float) -> tuple[Signal, ...]:
        """Return the signals since the last call; wait up to a time-out for the first one."""
        deadline_s = time.monotonic() + min(within_s, self._remaining_s())
        while not self._signals and (remaining_s := deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                self._keep_signal(self._receive(remaining_s))
        signals, self._signals = tuple(self._signals), []
        return signals

    def _answer(self, message: jeepney.Message) -> tuple[Any, ...]:
        serial = next(self._serials)
        self._send(message.serialise(serial=serial))
        while True:
            answer = self._receive(self._remaining_s())
            if answer.header.fields.get(jeepney.HeaderFields.reply_serial) == serial:
                break
            self._keep_signal(answer)
        if answer.header.message_type is jeepney.MessageType.error:
            words = [word for word in answer.body if isinstance(word, str)]
            name = answer.header.fields[jeepney.HeaderFields.error_name]
            raise CallRefused(name, words[0] if words else "")
        return tuple(answer.body)

    def _keep_signal(self, message: jeepney.Message) -> None:
        if message.header.message_type is jeepney.MessageType.signal:
            name = message.header.fields[jeepney.HeaderFields.member]
            self._signals.append((name, tuple(message.body)))

    def _send(self, data: bytes) -> None:
        self._socket.settimeout(self._remaining_s())
        self._socket.sendall(data)

    def _receive(self, timeout_s: float) -> jeepney.Message:
        deadline_s = time.monotonic() + timeout_s
        while (message := self._parser.get_next_message()) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            self._parser.add_data(self._read(remaining_s))
        return message

    def _read(self, timeout_s: float) -> bytes:
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the bus closed the connection")
        return data

    def _remaining_s(self) -> float:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s


@contextlib.contextmanager
def session(
    address: str, doing: str, *, timeout_s: float, failed: reasons.Reason, denied: reasons.Reason
) -> Iterator[Connection]:
    """Connect, and raise every error of the body as a HostError that begins with ``doing``.

    Its reason is ``denied`` if permission is missing, else ``failed``. ``timeout_s`` covers all
    until the last answer.
    """
    try:
        with Connection(address, timeout_s=timeout_s) as connection:
            yield connection
    except (
        OSError,
        CallRefused,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        reason = failed
        match error:
            case CallRefused(name=name) if name in _DENIED:
                why, reason = f"{error}; {_AS_ROOT}", denied
            case CallRefused():
                why = str(error)
            case PermissionError():
                why, reason = f"{error.strerror}; {_AS_ROOT}", denied
            case TimeoutError():
                why = "no answer over D-Bus in time"
            case OSError():
                why = f"D-Bus is unreachable: {error.strerror or error}"
            case auth.AuthenticationError(data=data) if bytes(data).startswith(b"REJECTED"):
                why, reason = _ANOTHER_USER, denied
            case _:
                why = f"this is not D-Bus: {error}"
        raise errors.HostError(f"{doing}: {why}", reason=reason) from error
