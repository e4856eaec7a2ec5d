"""News of the pods on our node while a run waits for some of them to go or to come.

Nothing depends on it: whoever waits looks for himself, now and then. This only wakes him when
there is something to see, so that he can look seldom and yet be quick.
"""

import threading
from collections.abc import Callable

import structlog

from mig_manager import errors, ports
from mig_manager.adapters.kube import api, stream

_PODS = "/api/v1/pods"
_WATCH_S = 300.0
_IDLE_MARGIN_S = 30.0
_AGAIN_S = 1.0
"""Pause before a watch that ended is opened again."""

_log = structlog.get_logger()


class PodNews(ports.Standby):
    """Watches the pods of one node from the moment that a run is going to change GPUs to its end.

    Args:
        kube: The API.
        node_name: The node.
        on_news: Called after each change of a pod, in a thread of ours.
    """

    def __init__(self, kube: api.KubeApi, *, node_name: str, on_news: Callable[[], None]) -> None:
        self._kube = kube
        self._selector = {"fieldSelector": f"spec.nodeName={node_name}"}
        self._on_news = on_news
        self._may_watch = True
        self._following: _Following | None = None

    def prepare(self) -> None:
        """Do nothing: for a look at the GPUs nobody waits for pods."""

    def expect_change(self) -> None:
        """Begin to watch, unless that is so already or the API has forbidden it before."""
        if self._following is None and self._may_watch:
            self._following = _Following()
            threading.Thread(
                target=self._follow, args=(self._following,), name="pod-news", daemon=True
            ).start()

    def dismiss(self) -> None:
        """Watch no more; a read that waits for its first byte ends by itself, unheard."""
        following, self._following = self._following, None
        if following is not None:
            following.end()

    def _follow(self, following: "_Following") -> None:
        while not following.ended.is_set():
            try:
                self._watch(following)
            except errors.ClusterError as error:
                if error.reason is errors.Reason.FORBIDDEN:
                    self._may_watch = False
                    _log.info("pods_not_watched", error=error.message)
                    return
                _log.debug("pod_news_lost", error=error.message)
            following.ended.wait(_AGAIN_S)

    def _watch(self, following: "_Following") -> None:
        opened = self._kube.watch(
            _PODS,
            query=self._selector,
            timeout_s=_WATCH_S,
            idle_timeout_s=_WATCH_S + _IDLE_MARGIN_S,
        )
        with opened:
            if not following.takes(opened):
                return
            for _ in opened:
                if following.ended.is_set():
                    return
                self._on_news()


class _Following:
    """One time of watching, and how it is ended from another thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._stream: stream.WatchStream | None = None

    def takes(self, opened: stream.WatchStream) -> bool:
        """Have the stream interrupted at the end; False: that has come already."""
        with self._lock:
            self._stream = opened
            return not self.ended.is_set()

    def end(self) -> None:
        """End it."""
        with self._lock:
            self.ended.set()
            opened = self._stream
        if opened is not None:
            opened.interrupt()
