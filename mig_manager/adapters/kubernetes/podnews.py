"""The pods on our node while a run waits for some of them to go or to come.

Nothing depends on it: whoever waits looks for himself, now and then, and asks the API before he
acts. This only wakes him when there is something to see, and spares the API most of his looks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, watch
from mig_manager.core import ports
from mig_manager.core.node import cluster

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
        )
        self._on_news = on_news
        self._may_watch = True
        self._watch: watch.Watch | None = None
        self._picture: _Picture | None = None

    def pods(self) -> tuple[cluster.Pod, ...] | None:
        """Return the node's pods as last told; None while no watch tells of them."""
        return self._picture.pods() if self._picture else None

    def prepare(self) -> None:
        """Do nothing: for a look at the GPUs nobody waits for pods."""

    def expect_change(self) -> None:
        """Begin to watch, unless that is so already or the API has forbidden it before."""
        if self._watch is None and self._may_watch:
            self._picture = _Picture(on_news=self._on_news, on_forbidden=self._give_up)
            self._watch = watch.Watch(self._kube, self._pods, self._picture, name="pod-news")
            self._watch.start()

    def dismiss(self) -> None:
        """Watch no more; a read that waits for its first byte ends by itself, unheard."""
        self._picture = None
        ended, self._watch = self._watch, None
        if ended is not None:
            ended.end(patience_s=0.0)

    def _give_up(self) -> None:
        self._may_watch = False
        if self._watch is not None:
            self._watch.end(patience_s=0.0)


class _Picture:
    """The pods as one watch tells of them; one that was dismissed changes nobody else's."""

    def __init__(self, *, on_news: Callable[[], None], on_forbidden: Callable[[], None]) -> None:
        self._on_news = on_news
        self._on_forbidden = on_forbidden
        self._known: dict[str, cluster.Pod] = {}
        """UID -> pod; replaced as a whole, for it is read in another thread."""
        self._is_told = False

    def pods(self) -> tuple[cluster.Pod, ...] | None:
        return tuple(self._known.values()) if self._is_told else None

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Begin with what is there; see ``watch.Listener``."""
        pods = [_read(item) for item in items]
        self._known = {pod.uid: pod for pod in pods}
        self._on_news()

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        """Take it over and wake who waits; see ``watch.Listener``."""
        pod = _read(item)
        others = {uid: other for uid, other in self._known.items() if uid != pod.uid}
        self._known = others if kind == "DELETED" else {**others, pod.uid: pod}
        self._on_news()

    def opened(self) -> None:
        """Vouch for the pods from now on; see ``watch.Listener``."""
        self._is_told = True

    def lost(self, error: Exception) -> None:
        """Vouch for nothing, and give up where the API forbids it; see ``watch.Listener``."""
        self._is_told = False
        if not isinstance(error, errors.ClusterError):
            _log.exception("pod_news_error")
        elif error.reason is errors.Reason.FORBIDDEN:
            _log.info("pods_not_watched", error=error.message)
            self._on_forbidden()
        else:
            _log.debug("pod_news_lost", error=error.message)


def _read(item: Mapping[str, Any]) -> cluster.Pod:
    with cluster.understood("a pod"):
        return cluster.parse_pod(item)
