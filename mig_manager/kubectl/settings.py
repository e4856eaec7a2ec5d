"""Settings of the plugin's commands; only colours have an environment variable."""

import dataclasses
from typing import Any

from mig_manager.cli.commands import settings
from mig_manager.cli.toolkit import console, program
from mig_manager.core import node_settings, options
from mig_manager.core.node import strategies

KUBECTL_OPTIONS = tuple(
    options.Option(
        name=name,
        metavar=metavar,
        help=meaning,
        short="s" if name == "server" else "",
        default_text="30s" if name == "request-timeout" else "",
        is_repeatable=name == "as-group",
        group="the cluster, as kubectl's own options",
        has_variable=False,
    )
    for name, metavar, meaning in (
        ("kubeconfig", options.FILE, "kubeconfig file"),
        ("context", "CONTEXT", "context of the kubeconfig"),
        ("cluster", options.NAME, "cluster of the kubeconfig"),
        ("user", options.NAME, "user of the kubeconfig"),
        ("as", options.NAME, "user to impersonate"),
        ("as-group", options.NAME, "group to impersonate; repeatable"),
        ("server", "ADDRESS", "address of the API server"),
        ("token", "TOKEN", "bearer token"),
        ("request-timeout", "TIME", "how long one request may take"),
        ("insecure-skip-tls-verify", "", "do not check the API server's certificate"),
    )
)
"""kubectl's own options: passed on, and allowed anywhere, as with kubectl."""


def _operand(meaning: str, name: str, metavar: str, commands: str, **more: Any) -> Any:
    return options.declared(
        options.Option(
            name=name, help=meaning, metavar=metavar, commands=commands, is_operand=True, **more
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """Settings of a command; every command reads a part of them."""

    layout: str | None = options.declared(
        options.Option(
            help="name of the layout",
            metavar=options.LAYOUT,
            commands="plan autoscaler-tags",
            is_operand=True,
            is_required=True,
        ),
        options.Option(
            help="which layout of a file with several", metavar=options.LAYOUT, commands="apply"
        ),
    )
    layouts: tuple[str, ...] = _operand(
        "layouts to check (default: all)",
        "layout",
        options.LAYOUT,
        "validate",
        is_repeatable=True,
        default=(),
    )
    nodes: tuple[str, ...] = _operand(
        "nodes (default: all with NVIDIA GPUs)",
        "node",
        "NODE",
        "status top plan capacity device-classes",
        is_repeatable=True,
        default=(),
    )
    node: str = _operand("the node", "node", "NODE", "apply layouts history", is_required=True)
    selector: str | None = options.text(
        "label selector of the nodes, as for kubectl",
        short="l",
        metavar="SELECTOR",
        commands="status top plan capacity validate device-classes",
    )
    is_watched: bool = options.declared(settings.WATCH)
    filename: str | None = options.text(
        "config document, '-' for standard input",
        short="f",
        metavar=options.FILE,
        commands="top plan apply validate layouts autoscaler-tags",
    )
    is_dry_run: bool = options.switch(
        "show what would change, and request nothing", name="dry-run", commands="apply"
    )
    config_map: str | None = options.text(
        "ConfigMap with the config document",
        metavar="NAMESPACE/NAME",
        default_text="mig-manager's, then the GPU operator's",
        commands="top plan validate layouts autoscaler-tags",
    )
    output_format: settings.OutputFormat = options.choice(
        "text|wide|json|yaml",
        name="output",
        short="o",
        metavar="FORMAT",
        default=settings.OutputFormat.TEXT,
        default_text="text; wide draws every node, json and yaml have everything",
        commands=(
            "status plan apply capacity validate layouts history autoscaler-tags device-classes"
        ),
    )
    gpu: str | None = options.text(
        "the GPUs of a node, such as 8xA100-SXM4-40GB (required)",
        metavar=options.SPEC,
        commands="autoscaler-tags",
    )
    strategy: strategies.Strategy = options.choice(
        "the device plugin's MIG strategy: mixed or single",
        metavar="STRATEGY",
        default=strategies.Strategy.MIXED,
        words="mixed single",
        commands="autoscaler-tags",
    )
    colour: node_settings.Colour = options.nested(settings.TerminalSettings, "color")
    kubectl: tuple[str, ...] = options.nested(KUBECTL_OPTIONS)
    """Arguments of every kubectl call."""


def plugin_settings(parsed: program.Parsed, terminal: console.Console) -> PluginSettings:
    """Read the settings of a command line; UsageError if a value cannot be used."""
    source = options.Source(parsed, {})
    return PluginSettings(
        **source.values(PluginSettings),
        colour=settings.colour(options.Source(parsed, terminal.environ)),
        kubectl=kubectl_options(parsed),
    )


def kubectl_options(parsed: program.Parsed) -> tuple[str, ...]:
    """Return kubectl's own options in its syntax."""
    arguments: list[str] = []
    for option in KUBECTL_OPTIONS:
        value = parsed.get(option.key)
        if not option.metavar:
            arguments += [f"--{option.name}"] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{option.name}={each}" for each in values if each is not None]
    if parsed.get("request_timeout") is None:
        arguments.append("--request-timeout=30s")
    return tuple(arguments)
