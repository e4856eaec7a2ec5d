"""What clients requested from the API server, from its audit log."""

import collections
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from testkit import authorization

Event = dict[str, Any]
AGENT = "system:serviceaccount:mig-manager:mig-manager"


class Log:
    """The audit log from now on.

    Args:
        path: The API server's audit log.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._start = path.stat().st_size

    def requests(self, user: str = AGENT) -> collections.Counter[str]:
        """Count a user's requests by verb and resource, such as ``list pods``."""
        return collections.Counter(
            f"{event['verb']} {_resource(event)}"
            for event in self._events()
            if event["user"]["username"] == user and not _ends_watch(event)
        )

    def evicted_pods(self) -> list[str]:
        """Return the names of the pods whose eviction was granted to anybody, not as a dry run."""
        return [
            event["objectRef"]["name"]
            for event in self._events()
            if _resource(event) == "pods/eviction"
            and event["responseStatus"]["code"] == 201
            and not _is_dry_run(event)
        ]

    def _events(self) -> Iterator[Event]:
        with self._path.open("rb") as log:
            log.seek(self._start)
            for line in log:
                # The API server may be writing the last one.
                if line.endswith(b"\n"):
                    yield json.loads(line)


def _ends_watch(event: Event) -> bool:
    """Check whether an event is the end of a watch, whose start is one of its own."""
    end = ("watch", "ResponseComplete", 200)
    return (event["verb"], event["stage"], event["responseStatus"]["code"]) == end


def _is_dry_run(event: Event) -> bool:
    options = event.get("requestObject", {}).get("deleteOptions") or {}
    return bool(options.get("dryRun"))


def _resource(event: Event) -> str:
    reference = event.get("objectRef", {})
    return authorization.full_resource(
        reference.get("resource", "none"), reference.get("subresource", "")
    )
