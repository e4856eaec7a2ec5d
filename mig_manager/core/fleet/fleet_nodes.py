"""A node of a cluster, as its labels, annotations and conditions show it."""

import dataclasses
import datetime as dt
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager import reasons
from mig_manager.core import messages, model, timestamps
from mig_manager.core.fleet import marks
from mig_manager.core.layout import custom_layouts, layout_list
from mig_manager.core.node.devices import resources, strategies
from mig_manager.core.objects import api_values, discovery_labels, node_object, well_known
from mig_manager.core.records import capacity, inventory_codec, journals, run_status

_GPU_LABELS = (discovery_labels.PRESENT, discovery_labels.MIG_CAPABLE)
NO_GPUS_SHOWN = "no agent shows its GPUs: either none runs there, or it can observe none"
_NO_USE = (
    "its agent has not published which instances are in use: it is outdated, has not finished a "
    "run, or got no answer from kubelet"
)
_OF_GPUS = ((well_known.RECOVERY_CONDITION, "True"), (well_known.READY_CONDITION, "Unknown"))
"""The agent's conditions while it can observe no GPU, best first, with their status."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetNode:
    """A node with what its agent published."""

    view: node_object.NodeView
    is_ready: bool
    version: str = ""  # ``resourceVersion``
    boot_id: str = ""  # of the machine, as kubelet last reported it; empty: unknown
    status: run_status.PublishedStatus | None = None  # None: missing or invalid
    status_error: str = ""  # why the status is invalid; empty if it is valid or missing
    gpu_problem: str = ""  # what the agent's conditions say about GPUs that it cannot observe
    mark: marks.Mark | None = None
    requested_by: str = ""  # last writer of the request, by ``managedFields``; empty if unknown
    requested_at: dt.datetime | None = None
    """When that writer last wrote to the node, which may be later than the request."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.view.name

    @property
    def order(self) -> tuple[str | int, ...]:
        """Sorts nodes as people count them: ``gpu-2`` before ``gpu-10``."""
        parts = re.split("([0-9]+)", self.name)
        return tuple(int(part) if at % 2 else part for at, part in enumerate(parts))

    @property
    def requested(self) -> str | None:
        """The requested layout."""
        return self.view.labels.get(well_known.CONFIG_LABEL) or None

    @property
    def state(self) -> str:
        """Label of the last run's state, which NVIDIA's manager also sets."""
        return self.view.labels.get(well_known.STATE_LABEL, "")

    @property
    def applied(self) -> str:
        """The layout last verified; empty for none."""
        return self.view.labels.get(well_known.APPLIED_LABEL, "")

    @property
    def applied_before(self) -> str:
        """The layout applied before the change under way, which removes the label; or empty."""
        text = self.view.annotations.get(well_known.JOURNAL_ANNOTATION)
        journal = journals.parse_or_none(text)
        return journal.applied_before if journal and not self.applied else ""

    @property
    def applied_text(self) -> str:
        """The applied layout for people, or the one before the change; empty for none."""
        return self.applied or (f"{self.applied_before} (before)" if self.applied_before else "")

    @functools.cached_property
    def strategy(self) -> strategies.Strategy | None:
        """The device plugin's MIG strategy by its label, or else by the resources; or unknown.

        GPU feature discovery sets no label for ``none``. It has settings of its own, and starts
        beside the plugin: resources that the label rules out count more than the label.
        """
        labelled = strategies.from_labels(self.view.labels)
        healthy = resources.devices_of(self.view.allocatable)
        has_mig = any(map(resources.is_mig, healthy))
        gpus, _ = published_gpus(self)
        if has_mig and all(map(resources.is_mig, healthy)):
            return strategies.Strategy.MIXED
        is_partitioned = bool(gpus) and all(
            gpu.current_mode is model.MigMode.ENABLED and gpu.devices for gpu in gpus or ()
        )
        is_outdated = labelled is strategies.Strategy.MIXED and is_partitioned and not has_mig
        if not healthy or (labelled and not is_outdated):
            return labelled
        if has_mig:
            return strategies.Strategy.MIXED
        advertised = sum(self.view.capacity.get(name, count) for name, count in healthy.items())
        is_whole = advertised < sum(len(gpu.devices) for gpu in gpus or ())
        return strategies.Strategy.NONE if is_whole else strategies.Strategy.SINGLE

    @property
    def gpus_text(self) -> str | None:
        """The published GPUs as JSON, for ``inventory_codec``."""
        return self.view.annotations.get(well_known.GPUS_ANNOTATION)

    @functools.cached_property
    def listed(self) -> layout_list.LayoutList:
        """The layouts that its agent lists."""
        try:
            text = self.view.annotations.get(well_known.LAYOUTS_ANNOTATION, "")
            return layout_list.from_json(text)
        except ValueError:
            return layout_list.UNKNOWN

    @property
    def is_reported(self) -> bool:
        """Whether the status is about the request: its name and, if custom, its content."""
        if self.status is None or self.status.layout != self.requested:
            return False
        expected = custom_layouts.CustomRequest.of(self.view).annotation_hash
        return self.status.annotation_hash in ("", expected)

    @property
    def has_gpus(self) -> bool:
        """Whether a label, a resource or an annotation indicates NVIDIA GPUs."""
        return (
            bool(self.requested or self.view.allocatable)
            or any(self.view.labels.get(label) == "true" for label in _GPU_LABELS)
            or well_known.STATUS_ANNOTATION in self.view.annotations
        )

    @property
    def is_changing(self) -> bool:
        """Whether its agent works on a request, or has not restored the node after one."""
        return (
            self.state in run_status.UNDER_WAY
            or well_known.RECONFIGURING_TAINT in self.view.taint_keys
        )

    @property
    def has_published(self) -> bool:
        """Whether an agent has ever published a status or GPUs; NVIDIA's sets only the state."""
        return self.status is not None or bool(self.gpus_text)

    @property
    def is_unavailable(self) -> bool:
        """Whether no new pod can be scheduled to it: not ready, cordoned or tainted."""
        return (
            not self.is_ready
            or self.view.is_unschedulable
            or well_known.RECONFIGURING_TAINT in self.view.taint_keys
        )

    @property
    def current_status(self) -> run_status.PublishedStatus | None:
        """The status of the requested layout; None if the agent has not reported on it.

        The status of an agent that stopped during a run does not count: the next one continues.
        """
        response = self._response
        is_interrupted = response and response.reason == reasons.Reason.INTERRUPTED.value
        return None if is_interrupted else response

    @property
    def _response(self) -> run_status.PublishedStatus | None:
        published = self.status
        if published is None or not self.is_reported:
            return None
        failed_at = self.mark.failed_at if self.mark else None
        return published if failed_at is None or published.started_at != failed_at else None

    @property
    def is_finished(self) -> bool:
        """Whether its agent has finished with the requested layout and will not retry."""
        if self.requested is None:
            return True
        if self.state in run_status.UNDER_WAY:
            return False
        if self.status is None:
            # NVIDIA's manager sets only the state.
            return bool(self.state)
        return self.current_status is not None and not self.current_status.is_retried

    @property
    def has_responded(self) -> bool:
        """Whether its agent has started on the requested layout."""
        return self.state in run_status.UNDER_WAY or self._response is not None


def parse(item: Mapping[str, Any]) -> FleetNode:
    """Parse a Node object of the API; ClusterError if it is malformed."""
    view = node_object.parse_node(item)
    with api_values.as_cluster_error(f"node {view.name}"):
        is_ready = api_values.is_ready(item.get("status") or {})
        gpu_problem = _gpu_problem(item.get("status") or {})
        metadata = item["metadata"]
        boot_id = str(((item.get("status") or {}).get("nodeInfo") or {}).get("bootID") or "")
        requested_by, requested_at = _writer(metadata)
    published, status_error = None, ""
    text = view.annotations.get(well_known.STATUS_ANNOTATION)
    try:
        published = None if text is None else run_status.parse(text)
    except ValueError as error:
        status_error = messages.printable(str(error)) or "it is empty"
    return FleetNode(
        view=view,
        is_ready=is_ready,
        version=str(metadata.get("resourceVersion") or ""),
        boot_id=boot_id,
        status=published,
        status_error=status_error,
        gpu_problem=gpu_problem,
        mark=marks.parse(view.annotations.get(well_known.ROLLOUT_ANNOTATION)),
        requested_by=requested_by,
        requested_at=requested_at,
    )


def _gpu_problem(status: Mapping[str, Any]) -> str:
    """Return the message of the agent's condition about its GPUs; empty without a problem."""
    problems = {
        (each.get("type"), each.get("status")): each.get("message")
        for each in status.get("conditions") or ()
    }
    text = next(filter(None, map(problems.get, _OF_GPUS)), "")
    return messages.fit(messages.printable(str(text), " "), messages.MAX_BYTES)


def _writer(metadata: Mapping[str, Any]) -> tuple[str, dt.datetime | None]:
    """Return the field manager of the request's label, and when it last wrote."""
    for entry in metadata.get("managedFields") or ():
        owned = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
        if f"f:{well_known.CONFIG_LABEL}" in (owned.get("f:labels") or {}):
            manager = messages.printable(str(entry.get("manager") or ""))
            return manager, timestamps.parse(entry.get("time"))
    return "", None


def published_gpus(node: FleetNode) -> tuple[model.ObservedGpus | None, str]:
    """Return the GPUs that an agent has published, or None and the reason."""
    if not node.gpus_text:
        return None, node.gpu_problem or NO_GPUS_SHOWN
    try:
        return inventory_codec.from_json(node.gpus_text), ""
    except ValueError as error:
        return None, f"the published GPUs cannot be read: {messages.word(str(error))}"


def published_use(
    node: FleetNode, gpus: Iterable[model.Gpu]
) -> tuple[capacity.NodeUse | None, str]:
    """Return the use that an agent has published, or None and the reason.

    A GPU that lacks a used instance is left out: its use was observed at another time.
    """
    text = node.view.annotations.get(well_known.CAPACITY_ANNOTATION)
    if not text:
        return None, _NO_USE
    try:
        use = capacity.from_json(text)
    except ValueError as error:
        return None, f"the published use cannot be read: {messages.fit(str(error), 80)}"
    in_use = {
        gpu.uuid: used
        for gpu in gpus
        if (used := use.in_use.get(gpu.uuid)) is not None
        # A GPU without MIG has no instances: it is in use as a whole.
        if gpu.current_mode is not model.MigMode.ENABLED
        or used <= {gi.placement for gi in gpu.gpu_instances}
    }
    return dataclasses.replace(use, in_use=in_use), ""
