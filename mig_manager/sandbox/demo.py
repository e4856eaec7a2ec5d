"""``mig-manager demo``: the whole story on a simulated node, with the real agent."""

import dataclasses
import pathlib
import threading
from collections.abc import Callable

from mig_manager.adapters.host import clock
from mig_manager.catalogue import hardware
from mig_manager.core import bar, picture
from mig_manager.core.layout import config
from mig_manager.core.node import cluster
from mig_manager.sandbox.driver import states
from mig_manager.sandbox.show import scenarios, stages, timeline

_HURRY = 0.25
"""The simulated driver takes a quarter of what real ones take, for impatient readers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to show, and how."""

    spec: str
    """The GPUs, such as ``8xA100-SXM4-40GB``."""
    scenario: str
    """A key of ``scenarios.STORIES``."""
    packaged: pathlib.Path
    """The config document that comes with the program."""
    is_real_time: bool
    """Whether the simulated driver takes as long as real ones."""
    is_kept: bool
    """Whether the node stays up afterwards, for ``kubectl``, until SIGINT."""


def run(options: Options, *, say: Callable[[str], None], style: bar.Style) -> int:
    """Play one scenario.

    Args:
        options: What to show.
        say: Writes one line.
        style: What the terminal can show.

    Returns:
        0 when everything came out as it must, 1 otherwise.

    Raises:
        UsageError: The spec is no node.
        NotReadyError: A part of the stage did not come up.
    """
    story = scenarios.STORIES[options.scenario]
    products = hardware.parse_node(options.spec)
    gpus = [hardware.template(product, index) for index, product in enumerate(products)]
    text = options.packaged.read_text(encoding="utf-8")
    document = config.parse(text, source=options.packaged.name)
    stage = stages.Stage(
        options.spec,
        text + scenarios.extra_layouts(gpus, document),
        latency=_latency(1.0 if options.is_real_time else _HURRY),
        agent_options=story.agent_options,
    )
    say(style.paint(f"{story.title}, on {options.spec} (simulated)", bar.Tone.STRONG))
    with stage:
        story.prepare(stage)
        is_good = _show(stage, story, story.layout(gpus), say=say, style=style)
        if options.is_kept:
            _keep(stage, say)
    return 0 if is_good else 1


def _show(
    stage: stages.Stage,
    story: scenarios.Story,
    layout: str,
    *,
    say: Callable[[str], None],
    style: bar.Style,
) -> bool:
    lines = timeline.Timeline(say, style, clock.SystemClock())
    stop = stage.cluster.listen(lines.hear)
    for kind, obj in stage.everything():
        lines.hear(kind, obj)
    say(f"\nbefore\n{picture.draw_gpus(stage.gpus.observe(), style=style)}")
    say("")
    lines.begin()
    lines.tell(
        "you", f"kubectl label node {stages.NODE_NAME} {cluster.CONFIG_LABEL}={layout} --overwrite"
    )
    checks = story.play(stage, layout, lambda text: lines.tell("you", text))
    lines.end()
    stop()
    say(f"\nafter\n{picture.draw_gpus(stage.gpus.observe(), style=style)}")
    say("")
    for check in checks:
        mark, tone = ("✓", bar.Tone.GOOD) if check.holds else ("✗", bar.Tone.BAD)
        say(f"{style.paint(style.plain(mark), tone)} {style.plain(check.text)}")
    return all(check.holds for check in checks)


def _keep(stage: stages.Stage, say: Callable[[str], None]) -> None:
    say("\nThe node stays up until you press Ctrl-C. In another terminal:")
    say(f"  export KUBECONFIG={stage.kubeconfig}")
    say(f"  kubectl describe node {stages.NODE_NAME}")
    say(f"  kubectl label node {stages.NODE_NAME} {cluster.CONFIG_LABEL}=all-disabled --overwrite")
    say(f"  mig-manager status --simulate-state {stage.state_file}")
    threading.Event().wait()


def _latency(factor: float) -> states.Latency:
    return states.Latency(
        **{
            field.name: getattr(states.REALISTIC, field.name) * factor
            for field in dataclasses.fields(states.Latency)
        }
    )
