"""The MIG devices by claims of all nodes, where DeviceClasses serve MIG resources.

A cluster before Kubernetes 1.34 does not serve this API. Without a DeviceClass for a MIG resource
only the DeviceClasses are watched.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, collection, watch
from mig_manager.core.node.devices import claims, device_classes
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.nodes import claimed_nodes, partitioned_nodes

_GROUP = f"/apis/{device_classes.VERSION}"
_OF_DRIVER = {"fieldSelector": f"spec.driver={well_known.GPU_CLAIM_DRIVER}"}
_Item = TypeVar("_Item")

_log = structlog.get_logger()


class _Optional(collection.Collection[_Item]):
    """A collection that is empty where the API does not serve or grant it."""

    is_absent = False  # whether the API does not serve or grant it

    @property
    def last_contact_s(self) -> float:
        """As of a collection; 0 while the API refuses it."""
        return 0.0 if self.is_absent else super().last_contact_s

    def on_open(self) -> None:
        self.is_absent = False
        super().on_open()

    def lost(self, error: Exception) -> None:
        match error:
            case errors.ClusterError(is_not_served=True):
                if not self.is_absent:
                    _log.info("collection_absent", of=self._plural, detail=error.message)
                self.is_absent = True
                self.on_list(())
                self._set_current()
            case _:
                self.is_absent = False
                super().lost(error)


class DeviceClaims:
    """Watches DeviceClasses and, once one serves a MIG resource, ResourceSlices and claims.

    ``on_change`` is called in a watch's thread when the devices of nodes have changed,
    ``on_current`` when changes arrive again.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        on_change: Callable[[], None],
        on_current: Callable[[], None],
        *,
        times: watch.WatchTimes | None = None,
    ) -> None:
        """Prepare, without a request."""
        self._on_change = on_change
        self._classes: _Optional[device_classes.DeviceClass] = _Optional(
            kube,
            device_classes.PATH,
            device_classes.parse,
            self._class_changed,
            on_current=on_current,
            times=times,
        )
        self._slices: _Optional[claims.Slice] = _Optional(
            kube,
            f"{_GROUP}/resourceslices",
            claims.parse_slice,
            lambda *_: on_change(),
            on_current=on_current,
            selector=_OF_DRIVER,
            times=times,
        )
        self._claims: _Optional[frozenset[claims.Device]] = _Optional(
            kube,
            f"{_GROUP}/resourceclaims",
            lambda item: claims.parse_claim(item) or None,
            lambda *_: None,
            on_current=on_current,
            times=times,
        )

    def start(self) -> None:
        """List and watch from now on."""
        self._classes.start()

    def close(self) -> None:
        """Stop watching."""
        for each in self._started_watches():
            each.end(timeout_s=0.0)

    @property
    def is_current(self) -> bool:
        """Whether changes arrive, as far as the cluster serves them."""
        return all(each.is_current for each in self._started_watches())

    @property
    def last_contact_s(self) -> float:
        """How long ago the API server last sent data."""
        return max((each.last_contact_s for each in self._started_watches()), default=0.0)

    def with_claims(
        self, nodes: Iterable[partitioned_nodes.PartitionedNode]
    ) -> tuple[partitioned_nodes.PartitionedNode, ...]:
        """Return the nodes with the devices that they have by claims."""
        classes = self._classes.items()
        if not classes:
            return tuple(nodes)
        cluster = claimed_nodes.ClusterClaims(
            classes=classes,
            slices=self._slices.items(),
            allocated=None if self._claims.is_absent else self._claims.items(),
        )
        return claimed_nodes.with_claims(nodes, cluster)

    def _started_watches(self) -> Iterator[_Optional[Any]]:
        yield self._classes
        if self._slices.is_started:
            yield from (self._slices, self._claims)

    def _class_changed(
        self, _before: device_classes.DeviceClass | None, now: device_classes.DeviceClass | None
    ) -> None:
        if now is not None and not self._slices.is_started:
            self._slices.start()
            self._claims.start()
        self._on_change()
