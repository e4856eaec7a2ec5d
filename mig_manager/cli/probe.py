"""The image's health check: asks the agent of this container whether it is alive.

Docker and podman run it beside the agent, in the agent's environment. Kubelet does not; it asks
the port itself.
"""

import http.client
import pathlib
import sys
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.agent import node_settings, settings
from mig_manager.cli import parser
from mig_manager.core import options

TIMEOUT_S = 3.0
_FIRST_PROCESS = pathlib.Path("/proc/1/cmdline")
"""The container's own program: it has the options that the environment does not have."""
_PROGRAMS = frozenset({"mig-manager", "nvidia-mig-manager"})
_HERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
"""Where to ask who listens everywhere: by number, as a container need not know names."""
_MAX_BYTES = 500


def main() -> int:
    """Check the agent of this container; return 0 if it is alive or serves no health, else 1."""
    try:
        command = _FIRST_PROCESS.read_bytes().decode(errors="replace").split("\0")
        is_alive, message = check(command, node_settings.process_environ())
    except errors.MigManagerError as error:
        is_alive, message = False, error.message
    except (OSError, http.client.HTTPException) as error:
        is_alive, message = False, f"the agent does not answer: {type(error).__name__}: {error}"
    sys.stdout.write(f"{message}\n")
    return 0 if is_alive else 1


def check(command: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the agent in a container is alive, and its message.

    The container's first process has this command line and this environment.

    Raises:
        UsageError: The command line or the environment is invalid.
        OSError: The agent does not answer.
        http.client.HTTPException: What answers does not speak HTTP.
    """
    # Our program may stand behind an interpreter or an init. Where a shell started it, only the
    # environment counts.
    words = [word for word in command if word]
    names = [word.rpartition("/")[2] for word in words]
    where = next((at for at, name in enumerate(names) if name in _PROGRAMS), None)
    parsed = {} if where is None else parser.parse(words[where + 1 :])
    if parsed.get("command", "agent") != "agent":
        return True, f"{parsed['command']} has no health to ask for"
    source = options.Source(parsed, environ)
    port = source.field(settings.AgentSettings, "health_port")
    if not port:
        return True, "there is no --health-port to ask"
    address = source.field(settings.AgentSettings, "health_address")
    connection = http.client.HTTPConnection(_HERE.get(address, address), port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        message = answer.read(_MAX_BYTES).decode(errors="replace").strip()
    finally:
        connection.close()
    return answer.status == http.HTTPStatus.OK, message


if __name__ == "__main__":
    sys.exit(main())
