"""What the plugin loads, which is what its user waits for."""

import json
import subprocess
import sys

HEAVY = (
    "google",
    "grpc",
    "kubernetes",
    "mig_manager.adapters.kubernetes.api",
    "mig_manager.adapters.nvml.gpus",
    "mig_manager.sandbox",
    "prometheus_client",
    "pynvml",
    "starlette",
    "structlog",
    "tenacity",
    "urllib3",
    "uvicorn",
    "watchdog",
)


def test_the_plugin_loads_no_cluster_library_no_driver_and_no_server() -> None:
    code = "import mig_manager.kubectl.__main__, sys, json; print(json.dumps(list(sys.modules)))"
    process = subprocess.run(  # noqa: S603 - the arguments are this file's own
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )

    assert set(HEAVY).isdisjoint(json.loads(process.stdout))
