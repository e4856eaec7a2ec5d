"""The record of an agent's request: its origin, whether it may evict, and the verified layout.

The next failure overwrites a status. This record changes only with the request and with
``success``, and decides whether a run may evict pods, even after a restart.
"""

import dataclasses
import enum
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.core.records import applied_gpus, change_failures, gpu_repair, run_status

VERSION = 1
MAX_PROBLEM = 600
"""Limit of a failed change and of each GPU's repair, in bytes: the record is an annotation."""


class Origin(enum.Enum):
    """The origin of a request."""

    LABEL = "label"  # the node's label names a layout of the file, or a generated layout
    CUSTOM = "custom"  # the node's annotation has the layout
    PARTITIONER = "partitioner"
    """The annotation has the layout, and its document is marked as a program's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The layout that was verified for a request."""

    content_hash: str  # hash of the layout; empty: unknown, and any content counts as the same
    is_from_owner: bool = False  # whether the owner is known to have written the layout
    is_as_applied: bool = False
    """Whether GPUs as in ``RequestRecord.applied_fingerprints`` have it; not if its content has
    changed without a request."""

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "configHash": self.content_hash,
            "owners": self.is_from_owner,
            "asApplied": self.is_as_applied,
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "Verified":
        """Parse plain data; see ``json_text.decoding`` for its exceptions."""
        return Verified(
            content_hash=json_text.string(data, "configHash"),
            is_from_owner=data["owners"] is True,
            is_as_applied=data.get("asApplied") is True,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request, and its progress."""

    layout: str
    annotation_hash: str = ""  # hash of the annotation with the layout; empty for other layouts
    origin: Origin = Origin.LABEL
    may_evict: bool = True
    """The request's part of ``pod_rights.decide``, which outlives an attempt; False for a layout
    that a program chose on demand, or on a node for such layouts."""
    verified: Verified | None = None  # None: no layout was verified since this was requested
    desired_hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By UUID: ``selection.desired_hashes`` of the layout, when the GPU was last reachable."""
    rebooted_hash: str | None = None
    """Content hash of the layout that the machine was rebooted for, empty if unknown; None: the
    machine was not rebooted."""
    rebooted_from: str = ""  # the boot in which the reboot was requested; empty: unknown
    awaited: frozenset[str] = frozenset()
    """Deploy labels of device plugin and DRA driver, if they ran without one before the taint, and
    new pods have not served the node yet. If a run ends before that, only this entry shows that
    they belong on the node."""
    applied_fingerprints: applied_gpus.GpuFingerprints | None = None
    """The layout that the label ``mig-manager.io/applied`` names, whatever is requested now; None:
    unknown, or no layout was applied."""
    failed_changes: change_failures.FailedChanges | None = None
    repairs: gpu_repair.Repairs = ()
    """The agent's own request beside this one: GPUs to reset, whatever the origin of the layout
    and its right to evict. A newer request postpones those under way."""

    @property
    def key(self) -> run_status.RequestKey:
        """Which request this is."""
        return run_status.RequestKey(self.layout, self.annotation_hash)

    @property
    def verified_fingerprints(self) -> applied_gpus.GpuFingerprints | None:
        """The GPUs as they had the layout of this request; None: it was not verified yet."""
        return self.applied_fingerprints if self.verified else None

    def absent_gpus(self, gpus: model.ObservedGpus, boot_id: str) -> tuple[str, ...]:
        """Name the GPUs that the driver no longer lists since then, not even as unreachable.

        After a reboot none is missing: a machine may come back with other GPUs.
        """
        applied = self.verified_fingerprints
        uuids = {gpu.uuid for gpu in (*gpus, *gpus.unreachable)}
        if applied is None or boot_id != applied.boot_id or not gpus or "" in uuids:
            return ()
        return tuple(applied.names.get(uuid, uuid) for uuid in applied.gpus if uuid not in uuids)

    def returned_gpus(self, uuids: Iterable[str]) -> frozenset[str]:
        """Return which of these GPUs were unreachable at the verification; none if unknown."""
        applied = self.verified_fingerprints
        return frozenset(uuids) - applied.gpus.keys() if applied else frozenset()

    def continued_as(
        self, current: "RequestRecord", *, is_new: bool, now_s: float
    ) -> "RequestRecord":
        """Return the request to serve: this one, if the same is requested again.

        The agent decides whether a custom layout may evict when it first reads the content. Later
        only the label for on-demand partitioning changes that, to no.

        Args:
            current: The request by label and annotation now.
            is_new: Whether label or annotation have changed since the last run.
            now_s: The Unix time.
        """
        if not is_new and self.key == current.key:
            return dataclasses.replace(self, may_evict=self.may_evict and current.may_evict)
        is_same = self.layout == current.layout
        return dataclasses.replace(
            current,
            # To an agent that has just started, another text of the verified content is new.
            verified=self.verified if is_same and not is_new else None,
            desired_hashes=self.desired_hashes if is_same and not is_new else {},
            rebooted_hash=self.rebooted_hash if is_same else None,
            rebooted_from=self.rebooted_from if is_same else "",
            awaited=self.awaited,
            applied_fingerprints=self.applied_fingerprints,
            repairs=gpu_repair.postpone(self.repairs, now_s),
        )

    def with_content(
        self, content_hash: str, desired_hashes: Mapping[str, str], *, is_from_owner: bool
    ) -> "RequestRecord":
        """Return the request once its layout's content is known.

        New content from the owner is a new request if it makes something else of the node's GPUs,
        so the old verification does not count. Other content changes without a request: with the
        program, the driver and the reachable GPUs. ``desired_hashes`` are of the reachable GPUs.
        """
        verified = self.verified
        common = self.desired_hashes.keys() & desired_hashes.keys()
        if verified and verified.content_hash != content_hash:
            is_same = not is_from_owner or not verified.content_hash
            if common and all(
                self.desired_hashes[uuid] == desired_hashes[uuid] for uuid in common
            ):
                # An unreachable GPU is compared once it is back.
                if common == self.desired_hashes.keys():
                    verified = dataclasses.replace(verified, content_hash=content_hash)
            else:
                verified = dataclasses.replace(verified, is_as_applied=False) if is_same else None
        return dataclasses.replace(
            self, verified=verified, desired_hashes={**self.desired_hashes, **desired_hashes}
        )

    def gpus_outside(self, gpus: Iterable[model.Gpu]) -> frozenset[str]:
        """Return the UUIDs of the GPUs that the layout is known not to select."""
        return frozenset(gpu.uuid for gpu in gpus if self.desired_hashes.get(gpu.uuid) == "")

    def with_status(self, status: run_status.RunStatus, boot_id: str) -> "RequestRecord":
        """Return the request with the content that the machine was rebooted for, if it was."""
        if status.layout != self.layout:
            return self
        if not status.is_rebooted:
            return dataclasses.replace(self, rebooted_hash=None, rebooted_from="")
        is_new = self.rebooted_hash is None
        return dataclasses.replace(
            self,
            rebooted_hash=status.content_hash or self.rebooted_hash or "",
            rebooted_from=boot_id if is_new else self.rebooted_from,
        )

    def with_success(self, status: run_status.RunStatus, boot_id: str) -> "RequestRecord":
        """Return the request after a run whose layout is active and verified."""
        return dataclasses.replace(
            self,
            verified=Verified(
                content_hash=status.content_hash,
                is_from_owner=status.is_from_owner,
                is_as_applied=True,
            ),
            awaited=frozenset(),
            failed_changes=None,
            applied_fingerprints=applied_gpus.GpuFingerprints.of(
                status.gpus, boot_id, self.gpus_outside(status.gpus)
            ),
        )

    def with_awaited(self, deploy_labels: Collection[str]) -> "RequestRecord":
        """Return the request with more advertisers that must serve the node again."""
        return dataclasses.replace(self, awaited=self.awaited.union(deploy_labels))

    def without_awaited(self, deploy_labels: Collection[str]) -> "RequestRecord":
        """Return the request without advertisers that serve the node."""
        return dataclasses.replace(self, awaited=self.awaited.difference(deploy_labels))

    def with_failed_change(self, failed: change_failures.FailedChanges) -> "RequestRecord":
        """Return the request after one more change that failed."""
        last = self.failed_changes
        if last and (last.content_hash, last.boot_id) == (failed.content_hash, failed.boot_id):
            failed = dataclasses.replace(failed, count=last.count + 1)
        return dataclasses.replace(self, failed_changes=failed)

    def is_label_outdated(self, gpus: model.ObservedGpus, boot_id: str) -> bool:
        """Return whether to remove the label of the applied layout, given the GPUs now.

        ``gpus`` is empty if none could be observed.
        """
        applied = self.applied_fingerprints
        return applied is not None and applied.is_outdated(gpus, boot_id)

    def to_json(self) -> str:
        """Return the text to keep."""
        data = {
            "version": VERSION,
            "config": self.layout,
            "annotationHash": self.annotation_hash or None,
            "origin": self.origin.value,
            "mayEvict": self.may_evict,
            "verified": self.verified and self.verified.to_data(),
            "desiredHashes": dict(self.desired_hashes) or None,
            "rebootedHash": self.rebooted_hash,
            "rebootedFrom": self.rebooted_from or None,
            "awaited": sorted(self.awaited) or None,
            "applied": self.applied_fingerprints and self.applied_fingerprints.to_data(),
            "failedChanges": self.failed_changes and self.failed_changes.to_data(),
            "repairs": [each.to_data() for each in self.repairs] or None,
        }
        return json.dumps({key: value for key, value in data.items() if value is not None})

    @staticmethod
    def from_json(text: str) -> "RequestRecord":
        """Parse a kept text; ValueError if it is invalid, or of an unknown version."""
        with json_text.decoding("a request kept by an agent"):
            data = json_text.parse_object(text)
            if data["version"] != VERSION:
                raise ValueError("not a request kept by a version this agent knows")
            verified, rebooted = data.get("verified"), data.get("rebootedHash")
            applied, failed = data.get("applied"), data.get("failedChanges")
            return RequestRecord(
                layout=json_text.string(data, "config"),
                annotation_hash=json_text.string(data, "annotationHash", ""),
                origin=Origin(data["origin"]),
                # Only the word itself allows evictions.
                may_evict=data["mayEvict"] is True,
                verified=None if verified is None else Verified.from_data(verified),
                desired_hashes=json_text.strings(data.get("desiredHashes", {})),
                rebooted_hash=None if rebooted is None else json_text.string(data, "rebootedHash"),
                rebooted_from=json_text.string(data, "rebootedFrom", ""),
                awaited=frozenset(json_text.string_list(data, "awaited")),
                applied_fingerprints=None
                if applied is None
                else applied_gpus.GpuFingerprints.from_data(applied),
                failed_changes=change_failures.FailedChanges.from_data(failed) if failed else None,
                repairs=tuple(map(gpu_repair.GpuRepairs.from_data, data.get("repairs", ()))),
            )


NONE = RequestRecord(layout="")  # no layout is requested
