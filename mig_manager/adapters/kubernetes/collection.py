"""The objects of one kind, of the cluster or a part, watched and reduced to facts."""

import http
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Generic, TypeVar

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, watch
from mig_manager.core.objects import api_values

_Item = TypeVar("_Item")

_log = structlog.get_logger()


class Collection(watch.Watch, Generic[_Item]):
    """All objects of one kind, converted by ``parse``; objects that become None are left out.

    Malformed objects are left out too, unless it ``is_strict``: a pod with an absurd request must
    not stop the work for all others.

    The watch's thread calls ``on_item`` with an object's old and new value, None for an object
    that was or is left out, and ``on_current`` whenever changes arrive again.
    """

    is_strict = False  # whether the watch counts as lost where an object is malformed

    def __init__(  # noqa: PLR0913 - the last three have defaults
        self,
        kube: api.KubeApi,
        path: str,
        parse: Callable[[Mapping[str, Any]], _Item | None],
        on_item: Callable[[_Item | None, _Item | None], None],
        *,
        on_current: Callable[[], None] = lambda: None,
        selector: Mapping[str, str] | None = None,
        times: watch.WatchTimes | None = None,
    ) -> None:
        name = f"{path.rpartition('/')[2]}-watch"
        super().__init__(kube, path, selector or {}, name=name, times=times)
        self._parse = parse
        self._on_item = on_item
        self._on_current = on_current
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], _Item] = {}
        self._malformed: set[tuple[str, str]] = set()
        """Keys of malformed objects, which are logged once."""
        self.is_current = False
        self.trouble = ""
        """Why changes do not arrive now; empty if they do, or before the first attempt."""
        self._lost_s = -math.inf
        """Since when changes do not arrive; -inf: they never did."""

    @property
    def last_contact_s(self) -> float:
        """How many seconds ago the API server last sent a change; inf if it never did.

        Lists do not count: a watch that is refused repeatedly lists every time.
        """
        now_s = time.monotonic()
        return super().last_contact_s if self.is_current else now_s - self._lost_s

    def items(self) -> tuple[_Item, ...]:
        """Return the objects as last reported."""
        with self._lock:
            return tuple(self._kept.values())

    def on_list(self, items: Iterable[Mapping[str, Any]]) -> None:
        malformed_before, self._malformed = self._malformed, set()
        parsed = (
            (key := _key(item), self._parse_item(key, item, malformed_before)) for item in items
        )
        now = {key: item for key, item in parsed if item is not None}
        with self._lock:
            before, self._kept = self._kept, now
        for key in before.keys() | now.keys():
            self._report(before.get(key), now.get(key))

    def on_change(self, kind: str, item: Mapping[str, Any]) -> None:
        key = _key(item)
        malformed_before = self._malformed & {key}
        self._malformed.discard(key)
        now = None if kind == "DELETED" else self._parse_item(key, item, malformed_before)
        with self._lock:
            before = self._kept.pop(key, None)
            if now is not None:
                self._kept[key] = now
        self._report(before, now)

    def on_open(self) -> None:
        self.trouble = ""
        self._set_current()

    def lost(self, error: Exception) -> None:
        if self.is_current:
            self._lost_s = time.monotonic()
        self.is_current = False
        if not isinstance(error, errors.ClusterError):
            _log.exception("collection_watch_error")
            self.trouble = f"internal error: {type(error).__name__}: {error}"
            return
        # A refusal repeats at every attempt.
        if error.message != self.trouble and error.status != http.HTTPStatus.GONE:
            _log.warning("collection_watch_lost", of=self._plural, detail=error.message)
        self.trouble = error.message

    def _set_current(self) -> None:
        self.is_current = True
        self._on_current()

    def _parse_item(
        self,
        key: tuple[str, str],
        item: Mapping[str, Any],
        malformed_before: Container[tuple[str, str]],
    ) -> _Item | None:
        try:
            return self._parse(item)
        except errors.ClusterError as error:
            if self.is_strict:
                raise
            if key not in malformed_before:
                _log.warning(
                    "object_left_out", name="/".join(filter(None, key)), detail=error.message
                )
            self._malformed.add(key)
            return None

    def _report(self, before: _Item | None, now: _Item | None) -> None:
        if before != now:
            self._on_item(before, now)


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    with api_values.as_cluster_error("an object of a watch"):
        metadata = item["metadata"]
        return str(metadata.get("namespace") or ""), str(metadata["name"])
