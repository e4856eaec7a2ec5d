"""What pages take from the code: metrics, Events, log lines, keys on the node."""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

import prometheus_client

import mig_manager
from mig_manager.agent.reports import metrics
from mig_manager.core.objects import well_known
from mig_manager.partitioner import metrics as partitioner

PACKAGE = pathlib.Path(mig_manager.__file__).parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]


def agent_metrics() -> list[Metric]:
    """Return the agent's metrics by name."""
    return _metrics(metrics.AgentMetrics(contact_age_s=lambda: 0.0).registry)


def partitioner_metrics() -> list[Metric]:
    """Return the partitioner's metrics by name."""
    return _metrics(partitioner.PartitionerMetrics(contact_age_s=lambda: 0.0).registry)


def _metrics(registry: prometheus_client.CollectorRegistry) -> list[Metric]:
    collectors = registry._collector_to_names  # noqa: SLF001 - the library has no other way
    return sorted(
        (
            _metric(collector)
            for collector in collectors
            if isinstance(collector, prometheus_client.metrics.MetricWrapperBase)
        ),
        key=lambda metric: metric.name,
    )


def _metric(collector: prometheus_client.metrics.MetricWrapperBase) -> Metric:
    (family,) = collector.describe()
    return Metric(
        name=f"{family.name}_total" if family.type == "counter" else family.name,
        kind=family.type,
        labels=tuple(collector._labelnames),  # noqa: SLF001
    )


def _calls(*without: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the code outside of the sandbox and these folders, with the name called."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if {"sandbox", *without} & set(path.relative_to(PACKAGE).parts):
            continue
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Call):
                name = each.func.attr if isinstance(each.func, ast.Attribute) else ""
                yield getattr(each.func, "id", name), each


def events() -> dict[str, str]:
    """Return the agent's Events that are no end of a run: their reasons and types."""
    types: dict[str, str] = {}
    for name, call in _calls("partitioner"):
        if name not in ("emit", "_announce"):
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        reason = named.get("reason") or next(iter(call.args), None)
        is_warning = named.get("is_warning")
        if isinstance(reason, ast.Constant) and isinstance(is_warning, ast.Constant):
            types[str(reason.value)] = "Warning" if is_warning.value else "Normal"
    return types


_LOGGING = frozenset({"debug", "info", "warning", "error", "exception", "log", "write"})


def log_lines() -> dict[str, list[str]]:
    """Return the names of all log lines with their fields, as they occur."""
    fields_by_name: dict[str, list[str]] = {}
    for name, call in _calls():
        texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        names = [text for text in texts if isinstance(text, str) and "_" in text]
        if name in _LOGGING and names and names[-1].isidentifier():
            fields = [keyword.arg or "" for keyword in call.keywords]
            if name == "exception" or "exc_info" in fields:
                fields = ["exception"]
            listed = fields_by_name.setdefault(names[-1], [])
            listed += [field for field in fields if field not in listed]
    return dict(sorted(fields_by_name.items()))


def node_keys() -> dict[str, str]:
    """Return the keys that the agent reads and writes, and what each is."""
    kinds = {
        "LABEL": "label",
        "ANNOTATION": "annotation",
        "TAINT": "taint",
        "CONDITION": "Node condition",
        "PREFIX": "labels",
    }
    by_key: dict[str, str] = {}
    for name, value in vars(well_known).items():
        kind = kinds.get(name.rpartition("_")[2])
        if kind is None or name[0] == "_" or name in {"RESOURCE_PREFIX", "PLUGIN_DEPLOY_LABEL"}:
            continue
        if value.startswith("node.kubernetes.io/"):  # documented by Kubernetes
            continue
        by_key[f"{value}*" if kind == "labels" else value] = kind
    by_key[well_known.KEEP_ANNOTATION] = "annotation on pods"
    return by_key
