"""Read and change the objects of the embedded API server past its API."""

import copy
from collections.abc import Callable

from mig_manager.sandbox.apiserver import content, kinds, store

Object = kinds.Object


class StoredObjects:
    """The objects of a server with a ``store``; its methods raise ``StatusError`` 404."""

    store: store.Store

    def get(self, resource: kinds.Resource, name: str, namespace: str = "") -> Object:
        """Return a copy of an object."""
        obj = self.store.peek((resource.plural, namespace, name))
        if obj is None:
            raise resource.not_found(name)
        return copy.deepcopy(obj)

    def objects(self, resource: kinds.Resource, namespace: str = "") -> list[Object]:
        """Return copies of the objects of a namespace; of all namespaces if it is empty."""
        return copy.deepcopy(self.store.select(resource.plural, namespace=namespace))

    def create(self, *objects: Object) -> None:
        """Create objects, in their order."""
        for each in objects:
            self.store.create(each)

    def modify(
        self,
        resource: kinds.Resource,
        name: str,
        change: Callable[[Object], object],
        *,
        namespace: str = "",
    ) -> Object:
        """Replace an object by a copy that ``change`` has edited."""
        with self.store.lock:
            obj = self.get(resource, name, namespace)
            change(obj)
            return self.store.write((resource.plural, namespace, name), obj)

    def merge(
        self, resource: kinds.Resource, name: str, patch: Object, *, namespace: str = ""
    ) -> Object:
        """Merge a patch into an object, in which None stands for a member to remove."""
        with self.store.lock:
            obj = self.get(resource, name, namespace)
            merged = content.apply_patch("application/merge-patch+json", obj, patch)
            return self.store.write((resource.plural, namespace, name), merged)

    def delete(self, resource: kinds.Resource, name: str, namespace: str = "") -> None:
        """Remove an object at once, without its grace period and finalizers."""
        if self.store.remove((resource.plural, namespace, name)) is None:
            raise resource.not_found(name)

    def compact(self) -> None:
        """Drop the history: the server answers 410 to all older resourceVersions."""
        self.store.trim_history(keep=0)
