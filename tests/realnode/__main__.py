"""A cluster of real programs to play on: ``just realnode up``, ``shell``, ``down``.

It runs in the background, on a network of its own: ``shell`` starts a shell there, in which
``kubectl`` speaks to it; ``shell COMMAND...`` runs one command. ``image`` builds the agent's image
alone, and prints its size.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.realnode import images, namespaces, progress, real_cluster
from tests.rigs import waiting

FOLDER = real_cluster.CACHE / "play"
_LOG, _PID, _READY = FOLDER / "log", FOLDER / "pid", FOLDER / "ready"
_FIRST_START_S = 2 * 3600.0
_HINTS = """The cluster is up. Try:
  just realnode shell kubectl label node node-a nvidia.com/mig.config=all-1g.5gb
  just realnode shell kubectl get node node-a --show-labels
  just realnode shell
  just realnode down
"""


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says; return an exit status."""
    match arguments:
        case ["up"]:
            return _up()
        case ["serve"]:
            return _serve()
        case ["shell", *command]:
            return _shell(command)
        case ["down"]:
            return _down()
        case ["image"]:
            return _image()
        case _:
            print(__doc__)
            return 2


def _up() -> int:
    missing = namespaces.missing()
    if missing or _is_running():
        print(missing or "The cluster is up already.")
        return 1
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with _LOG.open("wb") as log:
        serving = subprocess.Popen(
            [sys.executable, "-m", "tests.realnode", "serve"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _PID.write_text(str(serving.pid))
    print(f"Building and starting; the first time this takes long. Everything: {_LOG}", flush=True)
    progress.follow(
        _LOG, lambda: _READY.exists() or serving.poll() is not None, within_s=_FIRST_START_S
    )
    if serving.poll() is not None:
        print(f"{_LOG.read_text()[-3000:]}\nThe cluster has not come up; see {FOLDER}.")
        return 1
    print(_HINTS, end="")
    return 0


def _serve() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    cluster = real_cluster.RealCluster(FOLDER, real_cluster.CACHE, real_cluster.ClusterShape())
    with cluster.up():
        cluster.install_agent()
        _READY.touch()
        signal.sigwait({signal.SIGTERM})
    return 0


def _shell(command: Sequence[str]) -> int:
    if not _READY.exists() or not _is_running():
        print("The cluster is not up: just realnode up")
        return 1
    into = ["nsenter", f"--net=/proc/{_PID.read_text()}/ns/net", "--"]
    environ = os.environ | {"KUBECONFIG": str(FOLDER / "control/admin.kubeconfig")}
    shell = os.environ.get("SHELL", "/bin/sh")
    return subprocess.run([*into, *(command or [shell])], env=environ, check=False).returncode


def _down() -> int:
    if not _is_running():
        print("The cluster is not up.")
        return 1
    os.kill(int(_PID.read_text()), signal.SIGTERM)
    waiting.until(lambda: not _is_running(), "the end of the cluster")
    shutil.rmtree(FOLDER)
    return 0


def _image() -> int:
    every = images.Images(real_cluster.CACHE)
    every.agent()
    size = every.size()
    print(f"The image has {size.total_mb:.0f} MB: base {size.base_mb:.0f}, ours {size.own_mb:.0f}")
    return 0


def _is_running() -> bool:
    try:
        process = pathlib.Path("/proc", _PID.read_text())
        return b"tests.realnode" in (process / "cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
