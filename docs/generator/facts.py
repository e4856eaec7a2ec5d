"""What the code knows and pages tell: settings, metrics, Events, log lines, keys on the node."""

import argparse
import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

import prometheus_client

from mig_manager import arguments, metrics, settings
from mig_manager.core import cluster

PACKAGE = pathlib.Path(arguments.__file__).parent
_OWN = "MIG_MANAGER_"
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
        super().__init__({f"{_OWN}NODE_NAME": "a"})
        self.keys_in_order: list[str] = []

    def get(self, key: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Return the value, if any."""
        self.keys_in_order.append(key)
        return super().get(key, default)


def variables() -> dict[str, tuple[str, ...]]:
    """Return the variables that the agent's settings are read from, by the setting's name."""
    environ = _Asked()
    settings.agent_settings({}, environ)
    found: dict[str, tuple[str, ...]] = {}
    before = ""
    for key in environ.keys_in_order:
        if key.startswith(_OWN):
            foreign = (before,) if before and not before.startswith(_OWN) else ()
            found[key.removeprefix(_OWN).lower()] = (*foreign, key)
        before = key
    return found


def agent_settings() -> dict[str, list[Setting]]:
    """Return the agent's settings by the heading that its help has for them."""
    known = variables()
    (commands,) = (
        action
        for action in arguments.build()._actions  # noqa: SLF001 - argparse has no other way
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )
    groups: dict[str, list[Setting]] = {}
    for group in commands.choices["agent"]._action_groups:  # noqa: SLF001
        for action in group._group_actions:  # noqa: SLF001
            if action.help and action.dest != "help":
                groups.setdefault(str(group.title), []).append(_setting(action, known))
    told = {each.name for settings_ in groups.values() for each in settings_}
    groups[VARIABLES_ALONE] = [
        Setting(flags=(), name=name, variables=names, default="", meaning="")
        for name, names in known.items()
        if name not in told and name not in _options_without_effect()
    ]
    return groups


def _options_without_effect() -> set[str]:
    from mig_manager import peer  # noqa: PLC0415 - one use

    return {option.name.replace("-", "_") for option in peer.OPTIONS if not option.effect}


def _setting(action: argparse.Action, known: Mapping[str, tuple[str, ...]]) -> Setting:
    text = re.sub(r"\s+", " ", action.help or "").replace("%%", "%")
    default = re.search(r" ?\(default: (.*?)\)(?= \[|$)", text)
    meaning = re.sub(r" ?\(default: .*?\)(?= \[|$)| ?\[[A-Z_, ]+\]", "", text)
    return Setting(
        flags=tuple(action.option_strings),
        name=action.dest,
        variables=known.get(action.dest, ()),
        default=default[1] if default else "",
        meaning=meaning,
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
        if kind is None or name in {"RESOURCE_PREFIX", "PLUGIN_DEPLOY_LABEL"}:
            continue
        found[f"{value}*" if kind == "labels" else value] = kind
    found[cluster.KEEP_ANNOTATION] = "annotation on pods"
    return found
