"""What the settings of the plugin's commands share; only colours have an environment variable."""

from typing import Any

from mig_manager.cli.toolkit import command_line, command_settings
from mig_manager.core.objects import selectors
from mig_manager.core.settings import node_settings, options

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
COMMON = (*(each.name for each in KUBECTL_OPTIONS), "color")
"""For ``takes``: the options of every command."""
LAYOUT = options.Option(
    name="layout",
    help="name of the layout",
    metavar=options.LAYOUT,
    is_operand=True,
    is_required=True,
)


def drawn_output() -> Any:
    """Declare the format of an answer that can draw every node."""
    drawn = "text; wide draws each of several nodes"
    return command_settings.output_format(
        "text", "wide", "json", "yaml", name="output", default_text=drawn
    )


class PluginSettings(command_settings.TerminalSettings):
    """Settings of a command, which takes a part of the options."""

    selector: str | None = options.text(
        "label selector of the nodes, as for kubectl",
        short="l",
        metavar="SELECTOR",
        parse=selectors.validate_selector,
    )
    filename: str | None = options.text(
        "layout file, '-' for standard input", short="f", metavar=options.FILE
    )
    config_map: tuple[str, str] | None = options.declare(command_settings.CONFIG_MAP)
    output_format: node_settings.OutputFormat = command_settings.output_format(
        "text", "json", "yaml", name="output"
    )
    kubectl: tuple[str, ...] = options.declare_from(KUBECTL_OPTIONS)
    """Arguments of every kubectl call."""

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        names = ("NO_COLOR", "TERM", *node_settings.COLOUR.variables)
        environ = {name: source.environ[name] for name in names if name in source.environ}
        values = super().values(options.Source(source.parsed, environ))
        return values | {"kubectl": kubectl_options(source.parsed)}


class NodesSettings(PluginSettings):
    """Settings of a command about nodes."""

    nodes: tuple[str, ...] = options.declare(
        options.Option(
            name="node",
            help="nodes (default: all with NVIDIA GPUs)",
            metavar="NODE",
            is_operand=True,
            is_repeatable=True,
            default=(),
        )
    )


class NodeCommandSettings(PluginSettings):
    """Settings of a command about one node."""

    node: str = options.declare(
        options.Option(help="the node", metavar="NODE", is_operand=True, is_required=True)
    )


def kubectl_options(parsed: command_line.Parsed) -> tuple[str, ...]:
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
