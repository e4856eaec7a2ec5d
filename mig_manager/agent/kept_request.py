"""Keep the record of the request that the agent serves, on the Node and on the host.

It travels in the patches of a run. The host keeps a copy for a Node object that is deleted and
registered again, for example with the label from kubelet's flags.
"""

import dataclasses

import structlog

from mig_manager import errors
from mig_manager.core import model, ports
from mig_manager.core.layout import custom as customs
from mig_manager.core.node import cluster
from mig_manager.core.records import journals, requests, status

_NONE = requests.Request(config="")

_log = structlog.get_logger()


class KeptRequest:
    """The record of one node's request."""

    def __init__(self, deps: ports.Dependencies) -> None:
        self._file = deps.request_file
        self._boot_id = deps.boot_id
        self._is_recovered = False
        self._on_host = ""
        self.current = _NONE

    def recover(self, view: cluster.NodeView, journal: journals.Journal | None) -> None:
        """Read the record of an earlier agent; do nothing once this process has one.

        A record that names another request than the status is older than it: an agent of a
        version without records has served the node since. Then the status decides.
        """
        if self._is_recovered:
            return
        self._is_recovered = True
        published = status.read_or_none(view.annotations.get(cluster.STATUS_ANNOTATION))
        kept = _parsed(view.annotations.get(cluster.REQUEST_ANNOTATION))
        if kept is None and published is None:
            kept = self._read_host()
        elif kept is None or _is_older(kept, published):
            applied = view.labels.get(cluster.APPLIED_LABEL, "")
            kept = requests.of_status(published, journal, applied)
        if kept is not None:
            self.current = kept

    def begin(
        self, name: str, custom: customs.Custom | None, *, is_new: bool
    ) -> customs.Custom | None:
        """Note what is requested; return what ``custom`` stands for, with the first decision.

        Whether a custom layout may evict is decided when its content is first seen. Later only
        the label for on-demand partitioning changes that, to no.

        Args:
            name: The layout that the label names.
            custom: What ``custom`` stands for; None: another layout is requested.
            is_new: Whether label or annotation have changed since the last run.
        """
        never_evicts = custom is not None and custom.never_evicts
        key = (name, custom.annotation_hash if custom else "")
        if is_new or self.current.key != key:
            self._is_recovered = True
            origin = requests.Origin.LABEL
            if custom:
                is_marked = customs.is_marked(custom.text or "")
                origin = requests.Origin.PARTITIONER if is_marked else requests.Origin.CUSTOM
            # An agent that has just started sees a new text of the content that was verified.
            is_known = self.current.config == name and not is_new
            self.current = requests.Request(
                config=key[0],
                annotation_hash=key[1],
                origin=origin,
                may_evict=not never_evicts,
                verified=self.current.verified if is_known else None,
            )
        elif never_evicts:
            self.current = dataclasses.replace(self.current, may_evict=False)
        may_evict = self.current.may_evict
        return custom and dataclasses.replace(custom, is_on_demand=not may_evict)

    def end(self) -> None:
        """Note that nothing is requested any more."""
        self.current = _NONE
        self.save()

    @property
    def rebooted_layout(self) -> tuple[str, str] | None:
        """Name and content hash of the layout that the machine was rebooted for, if it was."""
        known = self.current.rebooted_hash
        return (self.current.config, known) if known else None

    def verify(self, config_hash: str, gpus: model.ObservedGpus, *, is_owners: bool) -> None:
        """Note that the requested layout is active and verified."""
        verified = requests.Verified(
            config_hash=config_hash,
            boot_id=self._boot_id,
            is_owners=is_owners,
            gpus=requests.fingerprint(gpus),
        )
        self.current = dataclasses.replace(self.current, verified=verified)

    def was_verified(self, config_hash: str, *, is_owners: bool) -> bool:
        """Return whether the resolved layout was verified, and nothing was requested since.

        What was verified of other content is forgotten, or counts no more as seen on the GPUs.

        New content is a new request, so what was verified before does not count any more. Content
        counts only if the owner wrote it. Other content changes without a request: with the
        program, the driver, and the GPUs that are reachable.
        """
        verified = self.current.verified
        if verified is None:
            return False
        is_same = not is_owners or verified.config_hash in ("", config_hash)
        if verified.config_hash != config_hash:
            # The GPUs do not show any more that it is active.
            verified = dataclasses.replace(verified, gpus="") if is_same else None
            self.current = dataclasses.replace(self.current, verified=verified)
        return is_same

    def note_reboot(self, published: status.Status) -> None:
        """Note for which content the machine was rebooted, if it was."""
        if published.config != self.current.config:
            return
        known = published.config_hash or self.current.rebooted_hash
        rebooted_hash = known if published.is_rebooted else ""
        self.current = dataclasses.replace(self.current, rebooted_hash=rebooted_hash)

    @property
    def annotations(self) -> dict[str, str | None]:
        """The annotation to write."""
        text = self.current.to_json() if self.current.config else None
        return {cluster.REQUEST_ANNOTATION: text}

    def save(self) -> None:
        """Copy what is published to the host; a failure is logged."""
        text = self.current.to_json()
        if self._file is None or text == self._on_host:
            return
        try:
            self._file.save(text)
        except errors.ConfigError as error:
            _log.warning("request_not_saved", error=error.message)
        self._on_host = text

    def _read_host(self) -> requests.Request | None:
        if self._file is None:
            return None
        try:
            return _parsed(self._file.read())
        except errors.ConfigError as error:
            _log.warning("request_not_read", error=error.message)
            return None


def _parsed(text: str | None) -> requests.Request | None:
    if not text:
        return None
    try:
        return requests.Request.from_json(text)
    except ValueError as error:
        _log.warning("request_unreadable", error=str(error))
        return None


def _is_older(kept: requests.Request, published: status.PublishedStatus | None) -> bool:
    # A status that names no request is of a run that ended without one. An agent that keeps
    # records may have died between a record and the first status of its run.
    if published is None or not published.config or published.keeps_request:
        return False
    return kept.key != (published.config, published.annotation_hash)
