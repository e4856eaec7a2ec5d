"""The image's health check: ask this container's agent or partitioner whether it is alive.

Docker and podman run it beside that program, in its environment. Kubelet does not run it: it
probes the port itself.
"""

import argparse
import http.client
import pathlib
import sys
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import process
from mig_manager.agent import agent_settings
from mig_manager.core.settings import options

TIMEOUT_S = 3.0
_FIRST_PROCESS = pathlib.Path("/proc/1/cmdline")
"""The container's main program: its command line may override the environment."""
_DROP_IN = "nvidia-mig-manager"  # is 'mig-manager agent'
_PROGRAMS = frozenset({"mig-manager", _DROP_IN})
_SERVERS = frozenset({"agent", "partitioner"})
"""The commands that serve health, with the same options."""
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
"""The address for a wildcard listener: numeric, because a container may not resolve names."""
_OPTIONS = frozenset({"health-address", "health-port"})
_MAX_BYTES = 500


def main() -> int:
    """Check this container's program; return 0 if it is alive or serves no health, else 1."""
    try:
        command = _FIRST_PROCESS.read_bytes().decode(errors="replace").split("\0")
        is_alive, message = check(command, process.environ())
    except errors.MigManagerError as error:
        is_alive, message = False, error.message
    except (OSError, http.client.HTTPException) as error:
        is_alive, message = False, f"/healthz does not answer: {type(error).__name__}: {error}"
    sys.stdout.write(f"{message}\n")
    return 0 if is_alive else 1


def check(command: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the program in a container is alive, and its message.

    The command line and the environment belong to the container's first process.

    Raises:
        UsageError: The command line or the environment is invalid.
        OSError: The program does not answer.
        http.client.HTTPException: The answer is not HTTP.
    """
    words = _our_words(command)
    if words and words[0] not in _SERVERS:
        return True, f"{words[0]} has no health to ask for"
    source = options.Source(_parse(words[1:]), environ)
    port = source.field(agent_settings.AgentSettings, "health_port")
    if not port:
        return True, "there is no --health-port to ask"
    address = source.field(agent_settings.AgentSettings, "health_address")
    connection = http.client.HTTPConnection(
        _LOOPBACK.get(address, address), port, timeout=TIMEOUT_S
    )
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        message = answer.read(_MAX_BYTES).decode(errors="replace").strip()
    finally:
        connection.close()
    return answer.status == http.HTTPStatus.OK, message


def _our_words(command: Sequence[str]) -> Sequence[str]:
    """Return the command and its options; empty if only the environment counts.

    Our program may follow an interpreter or an init. A shell hides its options.
    """
    words = [word for word in command if word]
    names = [word.rpartition("/")[2] for word in words]
    program = next((at for at, name in enumerate(names) if name in _PROGRAMS), len(words))
    if _DROP_IN in names[program : program + 1]:
        return ["agent", *words[program + 1 :]]
    first = (at for at in range(program + 1, len(words)) if not words[at].startswith("-"))
    return words[next(first, len(words)) :]


def _parse(words: Sequence[str]) -> Mapping[str, object]:
    """Return the options that locate the health port."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options.of(agent_settings.AgentSettings):
        if option.name in _OPTIONS:
            reader.add_argument(*option.flags, dest=option.key)
    return vars(reader.parse_known_args(words)[0])


if __name__ == "__main__":
    sys.exit(main())
