"""A client of the API whose process is killed at one of its requests."""

import threading
from collections.abc import Mapping
from typing import Any

from mig_manager.adapters.kubernetes import api
from tests.rigs.node import strikes


class MortalApi(api.KubeApi):
    """A client whose process is killed at its n-th request, before it is sent or after.

    Requests of the watches do not count.
    """

    kill_at: int | None = None
    is_sent = False
    count = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.patches: list[Mapping[str, Any]] = []
        """The bodies of the patches that were sent."""

    def answer(self, request: api.Request) -> dict[str, object]:
        if threading.current_thread().name.endswith("-watch"):
            return super().answer(request)
        self.count += 1
        if request.method == "PATCH":
            assert request.body is not None
            self.patches.append(request.body)
        if self.kill_at is not None and self.count >= self.kill_at:
            if self.is_sent and self.count == self.kill_at:
                super().answer(request)
            raise strikes.Killed
        return super().answer(request)
