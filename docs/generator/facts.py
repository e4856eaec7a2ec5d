"""What the code knows and pages tell: settings, metrics, Events, log lines, keys on the node."""

import ast
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Container, Iterator

import prometheus_client

import mig_manager
from mig_manager.agent import metrics, settings
from mig_manager.cli import commandline
from mig_manager.core.node import cluster

PACKAGE = pathlib.Path(mig_manager.__file__).parent
OWN_PREFIX = "MIG_MANAGER_"
VARIABLES_ALONE = "variables without an option"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the agent."""

    flags: tuple[str, ...]
    """Empty: it has none, only variables."""
    name: str
    """As ``settings`` calls it."""
    variables: tuple[str, ...]
    """That of others first, which goes before ours."""
    default: str
    """Empty: none, or not told."""
    meaning: str


class _Asked(dict[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        # The one setting that there must be.
        super().__init__({f"{OWN_PREFIX}NODE_NAME": "a"})
        self.keys_in_order: list[str] = []

    def get(self, key: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Return the value, if any."""
        self.keys_in_order.append(key)
        return super().get(key, default)


def variables_asked_for() -> list[str]:
    """Return the variables that the agent's settings are read from, in that order."""
    environ = _Asked()
    settings.agent_settings({}, environ)
    return environ.keys_in_order


def agent_settings() -> dict[str, list[Setting]]:
    """Return the agent's settings by the heading that its help has for them."""
    groups: dict[str, list[Setting]] = {}
    (agent,) = (each for each in commandline.commands() if each.name == "agent")
    for option in agent.options:
        if option.long != "--help":
            groups.setdefault(option.group, []).append(_setting(option))
    told = {name for each in groups.values() for setting in each for name in setting.variables}
    groups[VARIABLES_ALONE] = list(_without_options(told))
    return groups


def _setting(option: commandline.Option) -> Setting:
    text = re.sub(r"\s+", " ", option.told)
    default = re.search(r" ?\(default: (.*?)\)$", text)
    return Setting(
        flags=option.flags,
        name=option.long.removeprefix("--").replace("-", "_"),
        variables=option.variables,
        default=default[1] if default else "",
        meaning=text[: default.start()] if default else text,
    )


def _without_options(told: Container[str]) -> Iterator[Setting]:
    asked = variables_asked_for()
    for before, key in itertools.pairwise(asked):
        if key.startswith(OWN_PREFIX) and key not in told:
            is_of_others = f"{OWN_PREFIX}{before}" == key
            yield Setting(
                flags=(),
                name=key.removeprefix(OWN_PREFIX).lower(),
                variables=(before, key) if is_of_others else (key,),
                default="",
                meaning="",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of the agent."""

    name: str
    kind: str
    labels: tuple[str, ...]


def agent_metrics() -> list[Metric]:
    """Return the agent's metrics by name."""
    registry = metrics.Metrics(contact_age_s=lambda: 0.0).registry
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


def _calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the agent's own code, with the name that is called."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "sandbox" in path.relative_to(PACKAGE).parts:
            continue
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Call):
                name = each.func.attr if isinstance(each.func, ast.Attribute) else ""
                yield getattr(each.func, "id", name), each


def events() -> dict[str, str]:
    """Return the Events that are no end of a run: their reasons and types."""
    found: dict[str, str] = {}
    for name, call in _calls():
        if name not in ("emit", "_announce"):
            continue
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        reason = named.get("reason") or next(iter(call.args), None)
        is_warning = named.get("is_warning")
        if isinstance(reason, ast.Constant) and isinstance(is_warning, ast.Constant):
            found[str(reason.value)] = "Warning" if is_warning.value else "Normal"
    return found


_LOGGING = frozenset({"debug", "info", "warning", "error", "exception", "log", "write"})


def log_lines() -> dict[str, list[str]]:
    """Return the names of all log lines with their fields, as they occur."""
    found: dict[str, list[str]] = {}
    for name, call in _calls():
        texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        names = [text for text in texts if isinstance(text, str) and "_" in text]
        if name in _LOGGING and names and names[-1].isidentifier():
            fields = [keyword.arg or "" for keyword in call.keywords]
            if name == "exception" or "exc_info" in fields:
                fields = ["exception"]
            known = found.setdefault(names[-1], [])
            known += [field for field in fields if field not in known]
    return dict(sorted(found.items()))


def node_keys() -> dict[str, str]:
    """Return the keys that the agent reads and writes, and what each is."""
    kinds = {
        "LABEL": "label",
        "ANNOTATION": "annotation",
        "TAINT": "taint",
        "PREFIX": "labels",
    }
    found: dict[str, str] = {}
    for name, value in vars(cluster).items():
        kind = kinds.get(name.rpartition("_")[2])
        if kind is None or name[0] == "_" or name in {"RESOURCE_PREFIX", "PLUGIN_DEPLOY_LABEL"}:
            continue
        found[f"{value}*" if kind == "labels" else value] = kind
    found[cluster.KEEP_ANNOTATION] = "annotation on pods"
    return found
