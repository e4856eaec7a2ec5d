"""Signals that end a program which runs for ever, and those that must not."""

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

PROGRAM = """
import threading
from mig_manager.adapters import host
stopped = threading.Event()
host.end_on_signals(stopped.set)
print("ready", flush=True)
stopped.wait()
print("stopped in order")
"""


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGHUP], [signal.SIGQUIT], [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]],
)
def test_a_signal_stops_a_service_in_order_or_has_no_effect(
    numbers: Sequence[signal.Signals],
) -> None:
    with subprocess.Popen(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in numbers:
            process.send_signal(number)
        rest, _ = process.communicate(timeout=60)

    assert (process.returncode, rest) == (0, "stopped in order\n")
