"""What the real agent process serves and logs."""

import contextlib
import http.client
import json
import socket
from typing import Any

from prometheus_client import parser

from mig_manager.sandbox import stages


class Observed:
    def __init__(self, stage: stages.Stage, port: int) -> None:
        self.stage = stage
        self._port = port

    def ask(self, path: str) -> tuple[int, str]:
        """Return status and text; 0 while the port is closed."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
            except ConnectionRefusedError:
                return 0, ""
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def series(self, name: str) -> dict[str, float]:
        """Return the values of one metric by its labels' values."""
        _, text = self.ask("/metrics")
        return {
            ",".join(value for _, value in sorted(sample.labels.items())): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"mig_manager_{name}"
        }

    def lines(self) -> list[dict[str, Any]]:
        text = self.stage.agent_log.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
