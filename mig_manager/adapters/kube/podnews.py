"""News of the pods on our node while a run waits for some of them to go or to come.

Nothing depends on it: whoever waits looks for himself, now and then. This only wakes him when
there is something to see, so that he can look seldom and yet be quick.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors, ports
from mig_manager.adapters.kube import api, watch

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
        self._pods = watch.Collection(
            path="/api/v1/pods",
            selector={"fieldSelector": f"spec.nodeName={node_name}"},
            what="pod",
            # The events with which the server begins say no more than a list, and no less.
            is_listed=False,
        )
        self._on_news = on_news
        self._may_watch = True
        self._watch: watch.Watch | None = None

    def prepare(self) -> None:
        """Do nothing: for a look at the GPUs nobody waits for pods."""

    def expect_change(self) -> None:
        """Begin to watch, unless that is so already or the API has forbidden it before."""
        if self._watch is None and self._may_watch:
            self._watch = watch.Watch(self._kube, self._pods, self, name="pod-news")
            self._watch.start()

    def dismiss(self) -> None:
        """Watch no more; a read that waits for its first byte ends by itself, unheard."""
        ended, self._watch = self._watch, None
        if ended is not None:
            ended.end(patience_s=0.0)

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Ignore a list; see ``watch.Listener``."""

    def changed(self, _kind: str, _item: Mapping[str, Any]) -> None:
        """Wake who waits; see ``watch.Listener``."""
        self._on_news()

    def opened(self) -> None:
        """Ignore it; see ``watch.Listener``."""

    def lost(self, error: Exception) -> None:
        """Give up where the API forbids it; see ``watch.Listener``."""
        if not isinstance(error, errors.ClusterError):
            _log.exception("pod_news_error")
        elif error.reason is errors.Reason.FORBIDDEN:
            self._may_watch = False
            _log.info("pods_not_watched", error=error.message)
            if self._watch is not None:
                self._watch.end(patience_s=0.0)
        else:
            _log.debug("pod_news_lost", error=error.message)
