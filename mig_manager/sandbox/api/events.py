"""Events are one resource with two shapes: core/v1 and events.k8s.io/v1.

They are stored as core/v1. Field names: Kubernetes API reference, "Event v1 core" and
"Event v1 events.k8s.io".
"""

import re

from mig_manager.sandbox.api import resources, statuses

Object = statuses.Object

_CORE_OF_NEW = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_NEW_OF_CORE = {core: new for new, core in _CORE_OF_NEW.items()}
_TIMES = ("firstTimestamp", "lastTimestamp", "eventTime")
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def to_core(resource: resources.Resource, thing: Object) -> Object:
    """Return an object of a resource as it is stored.

    Raises:
        ApiError: 400: it is an Event with a time that cannot be read.
    """
    if resource is resources.EVENTS:
        _check_times(thing)
    if resource is not resources.NEW_EVENTS:
        return thing
    core = {_CORE_OF_NEW.get(key, key): value for key, value in thing.items()}
    _check_times(core)
    return core | {"apiVersion": "v1"}


def from_core(resource: resources.Resource, thing: Object) -> Object:
    """Return a stored object as a resource shows it."""
    if resource is not resources.NEW_EVENTS:
        return thing
    new = {_NEW_OF_CORE.get(key, key): value for key, value in thing.items()}
    return new | {"apiVersion": resource.api_version}


def _check_times(event: Object) -> None:
    for field in _TIMES:
        value = event.get(field)
        if value is not None and not _RFC_3339.fullmatch(str(value)):
            raise statuses.bad_request(
                f'Event in version "v1" cannot be handled as a Event: parsing time "{value}"'
            )
