"""The record of an agent's request: its origin, whether it may evict, and the verified layout.

The next failure overwrites a status. This record changes only with the request and with
``success``, and decides whether a run may evict pods, even after a restart.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Collection, Container, Iterable, Mapping

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.core.node import well_known
from mig_manager.core.records import gpu_codec, gpu_repair, journals, run_status

VERSION = 1
_HASH_DIGITS = 12
_MAX_FAILED_CHANGES = 3
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

    config_hash: str  # hash of the layout; empty: unknown, and any content counts as the same
    is_from_owner: bool = False  # whether the owner is known to have written the layout
    is_as_applied: bool = False
    """Whether GPUs as in ``RequestRecord.applied`` have it; not if its content has changed without
    a request."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The GPUs as they had the layout in the label ``mig-manager.io/applied``."""

    boot_id: str
    gpus: Mapping[str, str]
    """UUID -> fingerprint of mode and instances, of the GPUs that were reachable then; empty for
    a GPU outside the layout."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """UUID -> the GPU as messages name it."""

    @staticmethod
    def of(gpus: model.ObservedGpus, boot_id: str, outside: Container[str] = ()) -> "Applied":
        """Return the record of GPUs whose layout was verified; it does not select ``outside``."""
        return Applied(
            boot_id=boot_id,
            gpus={gpu.uuid: "" if gpu.uuid in outside else fingerprint(gpu) for gpu in gpus},
            names={gpu.uuid: str(gpu) for gpu in gpus},
        )

    def has_same(self, gpus: Collection[model.Gpu]) -> bool:
        """Return whether these are the recorded GPUs, and all still have the layout."""
        return {gpu.uuid for gpu in gpus} == self.gpus.keys() and not self.differs(gpus)

    def differs(self, gpus: Iterable[model.Gpu]) -> bool:
        """Return whether one of these GPUs that had the layout has other instances now."""
        return any(self.gpus.get(gpu.uuid, "") not in ("", fingerprint(gpu)) for gpu in gpus)

    def is_outdated(self, gpus: Iterable[model.Gpu], boot_id: str) -> bool:
        """Return whether a GPU lacks the layout, or may lack it: instances survive no reboot."""
        now = tuple(gpus)
        uuids = {gpu.uuid for gpu in now}
        has_returned = not uuids <= self.gpus.keys()
        is_unknown = boot_id != self.boot_id and uuids != self.gpus.keys()
        return has_returned or is_unknown or self.differs(now)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedChanges:
    """The changes to a layout that failed after they had evicted pods."""

    config_hash: str  # hash of the layout
    boot_id: str
    reason: errors.Reason  # reason of the last failure
    problem: str  # the last failure, as part of a sentence
    count: int = 1

    def may_evict(self, config_hash: str, boot_id: str) -> bool:
        """Return whether to evict pods once more; other content or a reboot may be the remedy."""
        is_same = (self.config_hash, self.boot_id) == (config_hash, boot_id)
        return not is_same or self.count < _MAX_FAILED_CHANGES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request, and its progress."""

    config: str
    annotation_hash: str = ""  # hash of the annotation with the layout; empty for other layouts
    origin: Origin = Origin.LABEL
    may_evict: bool = True
    verified: Verified | None = None  # None: no layout was verified since this was requested
    goals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """``layouts.goal_hashes`` of the layout by UUID, of each GPU when it was last reachable."""
    rebooted_hash: str | None = None
    """Content hash of the layout that the machine was rebooted for, empty if unknown; None: the
    machine was not rebooted."""
    rebooted_from: str = ""  # the boot in which the reboot was requested; empty: unknown
    awaited: frozenset[str] = frozenset()
    """Deploy labels of device plugin and DRA driver, if their pods were deleted and new ones have
    not served the node yet. If a run ends before that, and no label deploys them, only this entry
    shows that they belong on the node."""
    applied: Applied | None = None
    """What the label ``mig-manager.io/applied`` is about, whatever is requested now; None:
    unknown, or no layout was applied."""
    failed_changes: FailedChanges | None = None
    repairs: gpu_repair.Repairs = ()
    """The agent's own request beside this one: GPUs to reset, whatever the origin of the layout
    and its right to evict. A newer request postpones those under way."""

    @property
    def key(self) -> tuple[str, str]:
        """Name of the layout, and hash of its annotation."""
        return self.config, self.annotation_hash

    @property
    def verified_gpus(self) -> Applied | None:
        """The GPUs as they had the layout of this request; None: it was not verified yet."""
        return self.applied if self.verified else None

    def absent_gpus(self, gpus: model.ObservedGpus, boot_id: str) -> tuple[str, ...]:
        """Name the GPUs that the driver no longer lists since then, not even as unreachable.

        After a reboot none is missing: a machine may come back with other GPUs.
        """
        then = self.verified_gpus
        uuids = {gpu.uuid for gpu in (*gpus, *gpus.unreachable)}
        if then is None or boot_id != then.boot_id or not gpus or "" in uuids:
            return ()
        return tuple(then.names.get(uuid, uuid) for uuid in then.gpus if uuid not in uuids)

    def returned_gpus(self, uuids: Iterable[str]) -> frozenset[str]:
        """Return which of these GPUs were unreachable at the verification; none if unknown."""
        then = self.verified_gpus
        return frozenset(uuids) - then.gpus.keys() if then else frozenset()

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
        is_same = self.config == current.config
        return dataclasses.replace(
            current,
            # To an agent that has just started, another text of the verified content is new.
            verified=self.verified if is_same and not is_new else None,
            goals=self.goals if is_same and not is_new else {},
            rebooted_hash=self.rebooted_hash if is_same else None,
            rebooted_from=self.rebooted_from if is_same else "",
            awaited=self.awaited,
            applied=self.applied,
            repairs=gpu_repair.postpone(self.repairs, now_s),
        )

    def with_content(
        self, config_hash: str, goals: Mapping[str, str], *, is_from_owner: bool
    ) -> "RequestRecord":
        """Return the request once its layout's content is known.

        New content from the owner is a new request if it makes something else of the node's GPUs,
        so the old verification does not count. Other content changes without a request: with the
        program, the driver and the reachable GPUs. ``goals`` are of the reachable GPUs.
        """
        verified = self.verified
        common = self.goals.keys() & goals.keys()
        if verified and verified.config_hash != config_hash:
            is_same = not is_from_owner or not verified.config_hash
            if common and all(self.goals[uuid] == goals[uuid] for uuid in common):
                # An unreachable GPU is compared once it is back.
                if common == self.goals.keys():
                    verified = dataclasses.replace(verified, config_hash=config_hash)
            else:
                verified = dataclasses.replace(verified, is_as_applied=False) if is_same else None
        return dataclasses.replace(self, verified=verified, goals={**self.goals, **goals})

    def gpus_outside(self, gpus: Iterable[model.Gpu]) -> frozenset[str]:
        """Return the UUIDs of the GPUs that the layout is known not to select."""
        return frozenset(gpu.uuid for gpu in gpus if self.goals.get(gpu.uuid) == "")

    def with_status(self, published: run_status.RunStatus, boot_id: str) -> "RequestRecord":
        """Return the request with the content that the machine was rebooted for, if it was."""
        if published.config != self.config:
            return self
        if not published.is_rebooted:
            return dataclasses.replace(self, rebooted_hash=None, rebooted_from="")
        is_new = self.rebooted_hash is None
        return dataclasses.replace(
            self,
            rebooted_hash=published.config_hash or self.rebooted_hash or "",
            rebooted_from=boot_id if is_new else self.rebooted_from,
        )

    def with_success(self, published: run_status.RunStatus, boot_id: str) -> "RequestRecord":
        """Return the request after a run whose layout is active and verified."""
        return dataclasses.replace(
            self,
            verified=Verified(
                config_hash=published.config_hash,
                is_from_owner=published.is_from_owner,
                is_as_applied=True,
            ),
            awaited=frozenset(),
            failed_changes=None,
            applied=Applied.of(published.gpus, boot_id, self.gpus_outside(published.gpus)),
        )

    def with_awaited(self, deploy_labels: Collection[str]) -> "RequestRecord":
        """Return the request with more advertisers that must serve the node again."""
        return dataclasses.replace(self, awaited=self.awaited.union(deploy_labels))

    def with_failed_change(self, failed: FailedChanges) -> "RequestRecord":
        """Return the request after one more change that failed."""
        last = self.failed_changes
        if last and (last.config_hash, last.boot_id) == (failed.config_hash, failed.boot_id):
            failed = dataclasses.replace(failed, count=last.count + 1)
        return dataclasses.replace(self, failed_changes=failed)

    def is_label_outdated(self, gpus: model.ObservedGpus, boot_id: str) -> bool:
        """Return whether to remove the label of the applied layout, given the GPUs now.

        ``gpus`` is empty if none could be observed.
        """
        return self.applied is not None and self.applied.is_outdated(gpus, boot_id)

    def to_json(self) -> str:
        """Return the text to keep; older versions ignore members they do not know."""
        verified = self.verified
        applied = self.applied
        failed = self.failed_changes
        data = {
            "version": VERSION,
            "config": self.config,
            "annotationHash": self.annotation_hash or None,
            "origin": self.origin.value,
            "mayEvict": self.may_evict,
            "verified": verified
            and {
                "configHash": verified.config_hash,
                "owners": verified.is_from_owner,
                "asApplied": verified.is_as_applied,
            },
            "goals": dict(self.goals) or None,
            "rebootedHash": self.rebooted_hash,
            "rebootedFrom": self.rebooted_from or None,
            "awaited": sorted(self.awaited) or None,
            "applied": applied
            and {
                "bootId": applied.boot_id,
                "gpus": dict(applied.gpus),
                "names": dict(applied.names),
            },
            "failedChanges": failed
            and {
                "configHash": failed.config_hash,
                "bootId": failed.boot_id,
                "reason": failed.reason.value,
                "problem": failed.problem,
                "count": failed.count,
            },
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
            # A newer version may know further reasons.
            if failed and failed["reason"] not in {reason.value for reason in errors.Reason}:
                failed = None
            return RequestRecord(
                config=str(data["config"]),
                annotation_hash=str(data.get("annotationHash", "")),
                origin=Origin(data["origin"]),
                # Only the word itself allows evictions.
                may_evict=data["mayEvict"] is True,
                verified=None
                if verified is None
                else Verified(
                    config_hash=str(verified["configHash"]),
                    is_from_owner=verified["owners"] is True,
                    is_as_applied=verified.get("asApplied") is True,
                ),
                goals={str(uuid): str(goal) for uuid, goal in data.get("goals", {}).items()},
                rebooted_hash=None if rebooted is None else str(rebooted),
                rebooted_from=str(data.get("rebootedFrom", "")),
                awaited=frozenset(map(str, data.get("awaited", ()))),
                applied=None
                if applied is None
                else Applied(
                    boot_id=str(applied["bootId"]),
                    gpus={str(uuid): str(text) for uuid, text in applied["gpus"].items()},
                    names={
                        str(uuid): str(name) for uuid, name in applied.get("names", {}).items()
                    },
                ),
                failed_changes=None
                if failed is None
                else FailedChanges(
                    config_hash=str(failed["configHash"]),
                    boot_id=str(failed["bootId"]),
                    reason=errors.Reason(failed["reason"]),
                    problem=str(failed["problem"]),
                    count=int(failed["count"]),
                ),
                repairs=tuple(map(gpu_repair.RepairAttempts.from_data, data.get("repairs", ()))),
            )


def to_saved(record: RequestRecord, journal: journals.Journal) -> str:
    """Return the text to save on the host: a record, with the journal's entries of the host.

    Older versions read the record alone.
    """
    data = json.loads(record.to_json())
    if not journal.remaining.is_empty:
        data["journal"] = journal.remaining.to_json()
    return json.dumps(data)


def saved_journal(text: str) -> str:
    """Return the journal in a saved text; empty: it has none, or is invalid."""
    try:
        return str(json_text.parse_object(text).get("journal", ""))
    except ValueError:
        return ""


def fingerprint(gpu: model.Gpu) -> str:
    """Return 12 hexadecimal digits that change with the MIG mode and the instances of a GPU."""
    rows = gpu_codec.to_data([gpu.snapshot])
    rows[0]["instances"].sort(key=json.dumps)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:_HASH_DIGITS]


NONE = RequestRecord(config="")  # no layout is requested


def infer(
    published: run_status.PublishedStatus | None,
    journal: journals.Journal,
    labels: Mapping[str, str],
) -> RequestRecord:
    """Infer the request from status and labels; ``NONE`` if that is impossible.

    For a node whose agent kept no record. In doubt the request may not evict, so that neither an
    upgrade nor the migration from NVIDIA's manager evicts a pod.

    Args:
        published: The status.
        journal: The journal of an interrupted run.
        labels: The node's labels.
    """
    config = labels.get(well_known.CONFIG_LABEL)
    is_success = labels.get(well_known.STATE_LABEL) == model.State.SUCCESS.value
    if published is None and config and is_success:
        # NVIDIA's manager publishes no status. What its file had is unknown.
        return RequestRecord(config=config, verified=Verified(config_hash=""))
    if published is None or not published.config:
        return NONE
    is_drained = published.phase == model.Phase.DRAIN.value or journal.draining
    has_failed_early = (
        published.state is model.State.FAILED
        and published.phase == model.Phase.RESOLVE.value
        # A label that is gone shows nothing: a run after a reboot removes it.
        and labels.get(well_known.APPLIED_LABEL) in (None, published.config)
    )
    is_verified = run_status.was_active(published) or has_failed_early
    if not journal.has_only_gpu_entries:
        is_verified = False
    is_custom = bool(published.annotation_hash)
    return RequestRecord(
        config=published.config,
        annotation_hash=published.annotation_hash,
        origin=Origin.CUSTOM if is_custom else Origin.LABEL,
        # The status does not show whether a program made the request.
        may_evict=not is_custom or is_drained,
        verified=Verified(config_hash=published.config_hash) if is_verified else None,
        rebooted_hash=published.config_hash if published.is_rebooted else None,
    )
