"""A real ``libnvidia-ml.so.1`` over the simulated driver: built from ``nvml.c``, served from here.

Any process may load the library by its file or through the loader; dlopen, symbol lookup and
struct layout are real, and only what is behind each call is simulated.

On the wire a process first sends 16 bytes that identify it, on each connection; connections of one
process share one NVML session. Numbers are in native byte order. A request is its length (uint32),
the function's name with a NUL, the number of arguments (uint8), and for each argument a kind
(``v`` value, ``n`` NULL, ``m`` memory, ``s`` string), a uint64 (the value, or the size of what
follows) and the bytes. The answer is the NVML code (int32) and the bytes of each memory argument.
A connection that is closed instead makes the client abort.
"""

import contextlib
import ctypes
import functools
import os
import pathlib
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mig_manager.adapters import cuda
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.rigs import programs
from tests.rigs.driver import nvidia_functions  # noqa: F401 - registers what NVIDIA's programs call

NAME = "libnvidia-ml.so.1"
SOURCE = pathlib.Path(__file__).with_name("nvml.c")
_FLAGS = ("-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC")
_FUNCTION_NOT_FOUND = 13
_CUDA_ERROR_NO_DEVICE = 100
_GUARD = b"\xa5" * 256
"""Behind each memory argument: who writes past a struct of nvml.c overwrites it."""


def run(*line: str | pathlib.Path, folder: pathlib.Path | None = None, **variables: str) -> str:
    """Run a program of the tests with these variables beside ours, and return its output.

    Raises:
        CalledProcessError: It failed.
    """
    return subprocess.run(  # noqa: S603 - our own programs and arguments
        line,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    ).stdout


def add_cuda(library: pathlib.Path) -> None:
    """Put CUDA's driver library beside NVML's: it is the same file."""
    library.with_name(cuda.LIBRARY).symlink_to(library.name)


def environ(folder: pathlib.Path) -> dict[str, str]:
    """Return variables by which commands with real GPUs keep to a folder."""
    return {
        "HOST_ROOT_MOUNT": str(folder / "host"),
        "MIG_MANAGER_JOURNAL_FILE": str(folder / "journal"),
        "MIG_MANAGER_LOCK_FILE": str(folder / "lock"),
        "MIG_MANAGER_VERIFIED_LAYOUT_FILE": str(folder / "verified-layout"),
    }


@functools.cache
def _library_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        built = pathlib.Path(folder) / NAME
        linking = f"-Wl,-soname,{NAME}"
        run(
            programs.path_or_skip("cc"),
            *_FLAGS,
            linking,
            f"-o{built}",
            SOURCE,
            "-lpthread",
            "-ldl",
        )
        return built.read_bytes()


def build(folder: pathlib.Path) -> pathlib.Path:
    """Put the library into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / NAME
    library.write_bytes(_library_bytes())
    return library


@contextlib.contextmanager
def serve(folder: pathlib.Path, state: pathlib.Path) -> Iterator[pathlib.Path]:
    """Put the library into a folder and answer its calls for the body.

    Faults of the node that crash the process are not supported: they would end this one.

    Args:
        folder: Where the library and its socket are.
        state: The simulated node's state file; until it exists no driver is loaded.
    """
    library = build(folder)
    server = _Server(folder, state)
    try:
        yield library
    finally:
        server.close()
    assert not server.errors, server.errors


class _Library(nvml_faults.CountingLibrary):
    """The simulated driver with CUDA's functions, by their C names."""

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - see above
        return int(states.Code.SUCCESS)

    def cuDeviceGet(self, _device: object, ordinal: int) -> int:  # noqa: N802 - see above
        return _CUDA_ERROR_NO_DEVICE if ordinal else int(states.Code.SUCCESS)

    def cuCtxCreate_v2(  # noqa: N802 - see above
        self, _context: object, _flags: int, _device: int, visible: bytes | None, pid: int
    ) -> int:
        try:
            uuid = (visible or b"").decode()
            self.state.add_client(uuid, name="python3", pid=pid, is_process=True)
        except LookupError:
            return _CUDA_ERROR_NO_DEVICE
        return int(states.Code.SUCCESS)


class _Server:
    """Answers all clients of one library file; one thread a connection."""

    def __init__(self, folder: pathlib.Path, state: pathlib.Path) -> None:
        self._path = folder / "nvml.sock"
        self._state = state
        self._lock = threading.Lock()
        self._sessions: dict[bytes, _Library] = {}
        self._connections: dict[socket.socket, bytes] = {}
        self.errors: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        # A path to a socket may have 107 bytes; one through a descriptor always fits.
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._listener.bind(f"/proc/self/fd/{descriptor}/{self._path.name}")
        os.close(descriptor)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="nvml-library", daemon=True).start()

    def close(self) -> None:
        """Stop; calls that hang are left to the end of this process."""
        # To close a socket does not wake the thread that accepts; to shut it down does.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            process = _receive(connection, 16)
            with self._lock:
                session = self._sessions.setdefault(
                    process, _Library(nvml_faults.SharedState(self._state))
                )
                self._connections[connection] = process
            try:
                while True:
                    (length,) = struct.unpack("=I", _receive(connection, 4))
                    connection.sendall(_answer(session, _receive(connection, length)))
            except (ArithmeticError, LookupError, TypeError, ValueError, BufferError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            finally:
                with self._lock:
                    del self._connections[connection]
                    if process not in self._connections.values():
                        del self._sessions[process]


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _answer(session: nvml_faults.CountingLibrary, request: bytes) -> bytes:
    """Make one call.

    Raises:
        BufferError: The simulated driver wrote past the memory that the C library gave it.
        TypeError: The C library passed another number of arguments than the driver takes.
    """
    name, _, rest = request.partition(b"\0")
    function = name.decode()
    arguments, memory = _arguments(rest)
    try:
        entry = getattr(session, function)
    except AttributeError:
        code = _FUNCTION_NOT_FOUND
    else:
        code = _call(entry, function, arguments)
    for block in memory:
        if bytes(block)[-len(_GUARD) :] != _GUARD:
            raise BufferError(f"{function} wrote past the memory it was given")
    return struct.pack("=i", code) + b"".join(bytes(block)[: -len(_GUARD)] for block in memory)


def _call(entry: Callable[..., Any], function: str, arguments: list[object]) -> int:
    if function != "nvmlErrorString":
        return int(entry(*arguments))
    code, buffer = arguments
    text = entry(code) + b"\0"
    assert isinstance(buffer, ctypes.Array)
    ctypes.memmove(buffer, text, len(text))
    return int(states.Code.SUCCESS)


def _arguments(rest: bytes) -> tuple[list[object], list[ctypes.Array[ctypes.c_ubyte]]]:
    arguments: list[object] = []
    memory: list[ctypes.Array[ctypes.c_ubyte]] = []
    at = 1
    for _ in range(rest[0]):
        kind, number = struct.unpack_from("=cQ", rest, at)
        at += 9
        match kind:
            case b"v":
                arguments.append(number)
            case b"n":
                arguments.append(None)
            case b"s":
                arguments.append(rest[at : at + number])
                at += number
            case b"m":
                content = rest[at : at + number] + _GUARD
                block = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)
                arguments.append(block)
                memory.append(block)
                at += number
            case _:
                raise ValueError(f"argument of unknown kind {kind!r}")
    return arguments, memory
