"""The worker on its own: what it does when nobody is there to take its answer."""

import pathlib
import subprocess

from mig_manager.adapters.nvml_worker import client as nvml_worker
from mig_manager.adapters.nvml_worker import gpu_protocol
from mig_manager.sandbox import nvml
from mig_manager.sandbox.driver import libnvml, states


def ask(state: pathlib.Path, *, is_awaited: bool) -> int:
    """Leave a request, as a parent does that is killed right after; return the exit status."""
    with subprocess.Popen(  # noqa: S603 - our own program
        nvml_worker.worker_command(simulate_state=str(state)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        if not is_awaited:
            worker.stdout.close()
        worker.stdin.write(gpu_protocol.encode(gpu_protocol.Observe()))
        worker.stdin.close()
        return worker.wait(60)


def test_a_request_whose_asker_is_gone_is_not_carried_out(tmp_path: pathlib.Path) -> None:
    state = tmp_path / "node.json"
    nvml.create("1xA30", state, options=states.Options(logs_calls=True))

    assert ask(state, is_awaited=False) == 1
    assert libnvml.read_calls(state) == ()

    assert ask(state, is_awaited=True) == 0
    assert libnvml.read_calls(state) != ()
