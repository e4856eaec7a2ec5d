"""``mig-manager demo``: scenarios of the real agent on a simulated node."""

import dataclasses
import math
import pathlib
import shlex
from collections.abc import Callable, Iterable, Sequence

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.host import files
from mig_manager.catalogue import hardware
from mig_manager.core import messages, model
from mig_manager.core.display import picture, styles
from mig_manager.core.layout import layout_parser
from mig_manager.core.objects import well_known
from mig_manager.sandbox import demo_layouts, ending, node_spec, scenarios, stages, timeline
from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.driver import state_file, states
from mig_manager.sandbox.node import cluster_view

SPEC = "8xA100-SXM4-40GB"
STARTING = "The Kubernetes API and the daemons are starting."
"""Printed after the title, because the start takes seconds."""
_DISABLED = "all-disabled"
_CONFIG_MAP = ("mig-manager", "mig-manager-config")
"""Namespace and name of the agents' layout file, as in the shipped manifests."""
_CONFIG_KEY = "config.yaml"
_SPEED_UP = 0.25
"""The simulated driver takes a quarter of a real one's time, for impatient readers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to show, and how."""

    spec: str  # the GPUs, such as ``8xA100-SXM4-40GB``, or the file of a capture
    scenario: str
    packaged: pathlib.Path
    is_real_time: bool
    is_kept: bool  # whether the node stays up afterwards, for ``kubectl``, until a signal
    exports: Sequence[str] = ()  # commands that set up a shell whose PATH lacks the programs

    @property
    def latency(self) -> states.Latency:
        """Durations of the driver's calls."""
        factor = 1.0 if self.is_real_time else _SPEED_UP
        real = dataclasses.asdict(states.REALISTIC)
        return states.Latency(**{name: seconds * factor for name, seconds in real.items()})

    @property
    def node(self) -> str:
        """The GPUs for the simulated driver.

        Raises:
            UsageError: The file is no capture.
            ConfigError: It cannot be read.
        """
        return node_spec.node(self.spec).spec

    @property
    def gpus(self) -> list[model.Gpu]:
        """The GPUs of such a node, without a layout.

        Raises:
            UsageError: The spec is invalid, or no such GPU has MIG.
        """
        products = hardware.parse_node(self.node)
        if not any(product.is_mig_capable for product in products):
            names = messages.list_names(sorted({product.name for product in products}))
            raise errors.UsageError(
                f"{names} cannot be partitioned; name a GPU with MIG, such as {SPEC}"
            )
        return [hardware.template(product, index) for index, product in enumerate(products)]

    def simulating(self, default: str = "") -> str:
        """Return the option of a command that simulates these GPUs, unless it does anyway."""
        return "" if self.spec == default else f" --simulate {shlex.quote(self.spec)}"

    def layouts_with(self, name: str) -> str:
        """Return the packaged document, with the extra layout of that name if it exists."""
        text = self.packaged.read_text(encoding="utf-8")
        document = layout_parser.parse(text, source=self.packaged.name)
        return text + demo_layouts.render(self.gpus, document, names=(name,))


def run(options: DemoOptions, *, say: Callable[[str], None], style: styles.Style) -> int:
    """Play one scenario; return 0 if all checks pass, else 1.

    Raises:
        UsageError: The spec is invalid.
        NotReadyError: A part of the stage did not start.
        Exception: From ``say``.
    """
    scenario = scenarios.BY_NAME[options.scenario]
    gpus = options.gpus
    layout = scenario.layout(gpus)
    stage = stages.Stage(
        options.node,
        options.layouts_with(layout),
        latency=states.Latency(),
        agent_options=("--custom-layouts", *scenario.agent_options),
    )
    title = style.fit(f"{scenario.title}, on {options.spec} (simulated)")
    say(style.paint(title, styles.Tone.STRONG))
    say(STARTING)
    with ending.on_signals(stage.fail), stage:
        publish_layouts(stage)
        scenario.prepare(stage)
        # A reader sees only what follows: the driver needs no time before.
        state_file.SharedState(stage.machine.state_file).set_latency(options.latency)
        is_good = _show(stage, scenario, layout, say=say, style=style)
        others = demo_layouts.smallest_everywhere(gpus), demo_layouts.BALANCED, _DISABLED
        suggestions = _suggestions(options, next(each for each in others if each != layout))
        say_next(stage, options, suggestions, who="The node stays", say=say, style=style)
    return 0 if is_good else 1


def say_next(
    stage: stages.Stage,
    options: DemoOptions,
    suggestions: Iterable[tuple[str, str]],
    *,
    who: str,
    say: Callable[[str], None],
    style: styles.Style,
) -> None:
    """Print purposes and commands for them; keep the stage up if requested."""
    where = ", in another terminal" if options.is_kept else ""
    say(f"\n{style.paint(f'Try next{where}', styles.Tone.STRONG)}\n")
    if options.is_kept:
        say(f"  export KUBECONFIG={shlex.quote(str(stage.kubeconfig))}")
    for line in options.exports:
        say(f"  {line}")
    for purpose, command in suggestions:
        say(f"  {purpose}:\n    {command}")
    if options.is_kept:
        say(f"\n{who} up until you press Ctrl-C.")
        stage.wait(lambda: False, "Ctrl-C", timeout_s=math.inf)


def publish_layouts(stage: stages.Stage) -> None:
    """Create the ConfigMap of the agents' layout file, and mount it as kubelet does."""
    namespace, name = _CONFIG_MAP

    def mount(record: store.Record) -> None:
        content = record.obj.get("data") or {}
        if record.key == ("configmaps", namespace, name) and _CONFIG_KEY in content:
            with files.replacing(stage.config_file) as new:
                new.write_text(content[_CONFIG_KEY], encoding="utf-8")

    stage.server.store.subscribe(mount)
    text = stage.config_file.read_text(encoding="utf-8")
    stage.api.post(
        f"/api/v1/namespaces/{namespace}/configmaps",
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"namespace": namespace, "name": name},
            "data": {_CONFIG_KEY: text},
        },
    )


def _suggestions(options: DemoOptions, layout: str) -> Sequence[tuple[str, str]]:
    """Return pairs of a purpose and a command."""
    if options.is_kept:
        nodes = f"-l kubernetes.io/hostname={stages.NODE_NAME}"
        label = f"kubectl label node {stages.NODE_NAME} {well_known.CONFIG_LABEL}={layout}"
        return (
            ("the layouts of this node", f"kubectl mig layouts {stages.NODE_NAME}"),
            ("what another layout costs", f"mig-manager rollout {layout} {nodes} --dry-run"),
            ("change to it", f"{label} --overwrite"),
        )
    names = list(scenarios.BY_NAME)
    scenario = names[(names.index(options.scenario) + 1) % len(names)]
    simulation = options.simulating(SPEC)
    same = "" if options.scenario == names[0] else f" --scenario {options.scenario}"
    return (
        (
            scenarios.BY_NAME[scenario].title,
            f"mig-manager demo --scenario {scenario}{simulation}",
        ),
        ("what a layout changes on such GPUs", f"mig-manager plan {layout}{options.simulating()}"),
        (
            "the same again, and keep the node for kubectl",
            f"mig-manager demo{same}{simulation} --keep",
        ),
    )


def _show(
    stage: stages.Stage,
    scenario: scenarios.Scenario,
    layout: str,
    *,
    say: Callable[[str], None],
    style: styles.Style,
) -> bool:
    lines = timeline.Timeline(say, style, host.SystemClock(), fail=stage.fail)
    stop = stage.cluster.listen(lines.receive)
    for kind in cluster_view.WatchedKind:
        for obj in stage.cluster.list(kind):
            lines.receive(kind, obj)
    before = stage.gpus.observe()
    say("")
    lines.begin()
    checks = scenario.play(stage, layout, lambda text: lines.add("you", text))
    lines.end()
    stop()
    say_checks(checks, say=say, style=style)
    outcome = picture.draw_outcome(before, stage.gpus.observe(), style=style)
    say(f"\n{style.paint('The GPUs before and after', styles.Tone.STRONG)}\n\n{outcome}")
    return all(checks.values())


def say_checks(
    checks: scenarios.Checks, *, say: Callable[[str], None], style: styles.Style
) -> None:
    """Write a line for every check and its result."""
    say("")
    for text, holds in checks.items():
        mark, tone = ("✓", styles.Tone.GOOD) if holds else ("✗", styles.Tone.BAD)
        line = style.plain(style.fit(f"{mark} {text}", further="  "))
        say(f"{style.paint(line[0], tone)}{line[1:]}")
