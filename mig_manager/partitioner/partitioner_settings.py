"""Settings of the partitioner."""

import dataclasses
import enum
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Self

from mig_manager import errors
from mig_manager.core import model, profile_name
from mig_manager.core.fleet import node_amounts
from mig_manager.core.objects import lease, selectors
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.partitioning.nodes import partitioned_nodes
from mig_manager.core.settings import node_settings, options
from mig_manager.partitioner.replay import simulated_cluster

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_MAX_RESERVED = 99999
_LEASE = "leader election"
_MIN_LEASE_S = 45.0  # a write with all its retries takes up to 30 s
_OFFLINE = "offline"
_OF_REPLAY = ("prometheus", "replay_days", "scheduler", "replay_limit_s")


class Mode(enum.Enum):
    """The effect of decisions."""

    RECOMMEND = "recommend"  # report them in Events and metrics; change nothing
    ACT = "act"  # request the layouts


def _reserve(text: str) -> tuple[model.Profile, int]:
    name, equals, number = text.partition("=")
    count = int(number) if number.isascii() and number.isdigit() and len(number) <= 5 else 0  # noqa: PLR2004
    if not equals or not 1 <= count <= _MAX_RESERVED:
        raise ValueError("is not PROFILE=COUNT, such as 1g.5gb=2")
    try:
        return profile_name.parse(name), count
    except ValueError as error:
        raise ValueError(f"is not PROFILE=COUNT: {error}") from error


def _object_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("is not the name of an object")
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionerSettings:
    """Settings of the partitioner; durations in seconds."""

    mode: Mode = options.choice(
        "recommend reports what it would do in Events and metrics, act does it",
        metavar="MODE",
        default=Mode.RECOMMEND,
    )
    node_selector: tuple[selectors.Requirement, ...] = options.declare(
        options.Option(
            name="node-selector",
            help="use only nodes with these labels and mig-manager.io/partitioning=on-demand",
            metavar="SELECTOR",
            parse=selectors.parse_selector,
            default=(),
            default_text="every opted-in node",
        )
    )
    max_unavailable: str = options.text(
        "max opted-in nodes under change at once (number, or percentage: at least one)",
        metavar="NUMBER",
        default="10%",
        parse=node_amounts.parse,
    )
    cooldown_s: float | None = options.seconds(
        "min time between two changes of a node",
        default=None,
        default_text="as long as its last change took: 5 to 60 s",
    )
    max_failures: int = options.count(
        "requests that agents may fail in ten minutes, if they fail half of all, before requests "
        "stop for a while; 0: any number",
        default=5,
    )
    quiet_s: float = options.seconds(
        "how long demand must be unchanged before a decision", default=2.0, minimum=0.01
    )
    longest_wait_s: float = options.seconds(
        "longest time to wait for demand to be unchanged", default=15.0, minimum=0.01
    )
    reserved: tuple[tuple[model.Profile, int], ...] = options.declare(
        options.Option(
            name="reserve",
            help="devices of a profile that a change keeps on every node; repeatable",
            metavar="PROFILE=COUNT",
            parse=_reserve,
            default=(),
            is_repeatable=True,
        )
    )
    prepare_for_s: float | None = options.seconds(
        "keep devices ready for the pods that recent arrivals make likely within this time for "
        "each slice of their largest device; 0: none",
        default=None,
        default_text=f"{decisions.PREPARE_FOR_S:g}, without --base-layout",
    )
    base_layout: str | None = options.text(
        "layout that idle instances are merged back to", metavar=options.LAYOUT
    )
    merge_back_after_s: float = options.seconds(
        "how long a node must be without demand before its idle instances return to the base "
        "layout; 0: never",
        default=0.0,
    )
    config_file: pathlib.Path | None = options.path(
        "layout file with the base layout",
        short="f",
        variable="CONFIG_FILE",
        default_text="the layouts generated from each node's GPUs",
    )
    kubeconfig: pathlib.Path | None = options.path(
        "credentials", variable="KUBECONFIG", default_text="the pod's ServiceAccount"
    )
    lease_namespace: str = options.text(
        "namespace of the leader's Lease",
        variable="POD_NAMESPACE",
        default="mig-manager",
        parse=_object_name,
        group=_LEASE,
    )
    lease_name: str = options.text(
        "name of the Lease", default="mig-manager-partitioner", parse=_object_name, group=_LEASE
    )
    lease_duration_s: float = options.seconds(
        "how long other replicas wait after a leader was killed",
        default=60.0,
        minimum=_MIN_LEASE_S,
        # With longer times, replicas would disagree when a Lease has expired.
        maximum=lease.MAX_DURATION_S,
        group=_LEASE,
    )
    health_port: int = options.port(
        "serve /metrics, /healthz and /readyz on this port",
        default_text="disabled",
        group=options.METRICS,
    )
    health_address: str = options.declare(node_settings.HEALTH_ADDRESS)
    log_level: node_settings.LogLevel = options.declare(node_settings.LOG_LEVEL)
    log_format: node_settings.LogFormat = options.declare(node_settings.LOG_FORMAT)
    is_debug: bool = options.declare(
        dataclasses.replace(node_settings.DEBUG, short="", group=options.METRICS)
    )
    pod_name: str | None = options.text(
        "name of the partitioner's own pod; set by the manifests",
        variable="POD_NAME",
        has_flag=False,
    )
    simulated_nodes: pathlib.Path | None = options.path(
        "decide once about the nodes in this file and the pods in PODS, and print it; both are "
        "from 'kubectl get -o json'",
        name="simulate",
        group=_OFFLINE,
        has_variable=False,
    )
    simulated_pods: pathlib.Path | None = options.path(
        "file with the pods, for --simulate",
        name="pods",
        metavar="PODS",
        group=_OFFLINE,
        is_operand=True,
        has_variable=False,
    )
    is_replay: bool = options.switch(
        "with --simulate: replay the pods of the last days with the real decision, beside the "
        "present layouts and every generated one",
        name="replay",
        group=_OFFLINE,
        has_variable=False,
    )
    prometheus: tuple[str, ...] = options.declare(
        options.Option(
            name="prometheus",
            help="with --replay: URL of a Prometheus that has kube-state-metrics, or a file with "
            "its answer; for pods that the API forgot; repeatable",
            metavar=options.FILE,
            default=(),
            group=_OFFLINE,
            is_repeatable=True,
            has_variable=False,
        )
    )
    replay_days: int = options.count(
        "with --replay: how many days",
        metavar="DAYS",
        what="number of days",
        maximum=366,
        default=7,
        group=_OFFLINE,
        has_variable=False,
    )
    scheduler: simulated_cluster.Scheduler = options.choice(
        "with --replay: the profile of kube-scheduler, spread (its default) or packed",
        metavar="PROFILE",
        default=simulated_cluster.Scheduler.SPREAD,
        group=_OFFLINE,
        has_variable=False,
    )
    replay_limit_s: float = options.seconds(
        "with --replay: end after this time, with the days that were replayed",
        default=600.0,
        minimum=1.0,
        group=_OFFLINE,
        has_variable=False,
    )
    output_format: node_settings.OutputFormat = options.choice(
        "text, json or yaml",
        name="output-format",
        short="o",
        metavar="FORMAT",
        words=("text", "json", "yaml"),
        default=node_settings.OutputFormat.TEXT,
        group=_OFFLINE,
        has_variable=False,
    )
    colour: node_settings.Colour = options.declare(
        dataclasses.replace(node_settings.COLOUR, group=_OFFLINE, has_variable=False)
    )
    limits: decisions.PartitionerLimits

    def selects(self, node: partitioned_nodes.PartitionedNode) -> bool:
        """Return whether the selector matches a node."""
        return all(each.matches(node.labels) for each in self.node_selector)

    @classmethod
    def read(cls, parsed: Mapping[str, object], environ: Mapping[str, str]) -> Self:
        """Parse the settings of the partitioner.

        Raises:
            UsageError: A value is invalid, or two contradict each other.
        """
        values = options.Source(parsed, environ).values(cls)
        if values["longest_wait_s"] < values["quiet_s"]:
            raise errors.UsageError("--longest-wait-s must not be less than --quiet-s")
        if values["simulated_nodes"] is None and (pods := values["simulated_pods"]) is not None:
            raise errors.UsageError(f"unexpected {str(pods)!r}: PODS belongs to --simulate")
        if values["simulated_nodes"] is not None and values["simulated_pods"] is None:
            raise errors.UsageError("--simulate needs two files: --simulate NODES PODS")
        if values["is_replay"] and values["simulated_nodes"] is None:
            raise errors.UsageError("--replay needs --simulate NODES PODS")
        for key in _OF_REPLAY:
            if parsed.get(key) and not values["is_replay"]:
                raise errors.UsageError(f"--{key.replace('_', '-')} needs --replay")
        if values["is_debug"]:
            values["log_level"] = node_settings.LogLevel.DEBUG
        return cls(**values, limits=_limits(values))


def _limits(values: Mapping[str, Any]) -> decisions.PartitionerLimits:
    base_layout, prepare_for_s = values["base_layout"], values["prepare_for_s"]
    if bool(base_layout) is not bool(values["merge_back_after_s"]):
        raise errors.UsageError("--base-layout and --merge-back-after-s go together")
    if prepare_for_s and base_layout:
        raise errors.UsageError("--prepare-for-s and --base-layout exclude each other")
    reserved = dict(values["reserved"])
    if len(reserved) != len(values["reserved"]):
        raise errors.UsageError("--reserve names a profile twice")
    if prepare_for_s is None:
        prepare_for_s = 0.0 if base_layout else decisions.PREPARE_FOR_S
    return decisions.PartitionerLimits(
        max_unavailable=values["max_unavailable"],
        cooldown_s=values["cooldown_s"],
        reserved=reserved,
        merge_back_after_s=values["merge_back_after_s"],
        prepare_for_s=prepare_for_s,
    )
