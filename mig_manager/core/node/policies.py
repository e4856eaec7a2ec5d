"""Settings of a change: which pods it evicts, device-plugin configs and startup taints.

**Time slicing beside MIG.** The device plugin picks its config, with the replicas of each device,
by the node label ``nvidia.com/device-plugin.config``. A config that suits one layout is wrong for
the next. ``--plugin-configs all-1g.5gb=sliced,*=default`` maps layouts to configs; ``*`` stands
for all other layouts, which do not change the label without it. A run writes the label when it
resumes the plugin, and restores it if it does not succeed.
"""

import dataclasses
import enum
import re

from mig_manager.core.objects import well_known
from mig_manager.core.settings import options

_ANY_LAYOUT = "*"


class DrainPolicy(enum.Enum):
    """Which pods a change evicts."""

    AFFECTED = "affected"  # the pods that use devices to be destroyed
    NODE = "node"  # every pod of the node that has or requests a GPU
    NONE = "none"  # no pod: the change waits until the affected pods have ended


class DrainStrategy(enum.Enum):
    """How to drain if PodDisruptionBudgets grant only a part of the evictions."""

    ROLLING = "rolling"
    """Evict the granted pods, and go on when budgets grant more, as ``kubectl drain`` does."""
    WHOLE = "whole"  # evict no pod until budgets grant all evictions together


def parse_plugin_configs(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``layout=config,layout=config``; ValueError if a pair is malformed."""
    configs: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        layout, equals, config = (part.strip() for part in pair.partition("="))
        if not (layout and equals and well_known.LABEL_VALUE.fullmatch(config)):
            which = "" if pair == text.strip() else f"has {pair!r}, which "
            raise ValueError(f"{which}is not LAYOUT=CONFIG with a label's value as CONFIG")
        if layout in configs:
            raise ValueError(f"names layout {layout!r} twice")
        configs[layout] = config
    return tuple(configs.items())


_TAINT_KEY = re.compile(
    rf"(?:(?P<domain>[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?)/)?{well_known.LABEL_VALUE.pattern}"
)
_KUBERNETES_OWN = ("node.kubernetes.io", "node.cloudprovider.kubernetes.io", "readiness.k8s.io")
"""Domains of the taints that Kubernetes' controllers add and remove themselves."""


def parse_startup_taint(text: str) -> str:
    """Return the key of a startup taint; ValueError if invalid, or owned by another program."""
    key = text.strip()
    match = _TAINT_KEY.fullmatch(key)
    if match is None:
        raise ValueError("is not the key of a taint; write DOMAIN/NAME, without value and effect")
    if key == well_known.RECONFIGURING_TAINT:
        raise ValueError("is the agent's own taint during a change")
    if match["domain"] in _KUBERNETES_OWN:
        raise ValueError("is a taint of Kubernetes: only its controller removes it")
    return key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to drain, and the plugin configs and startup taints of layouts."""

    drain: DrainPolicy = options.choice(
        "evict the affected pods, all GPU pods of the node, or none",
        name="drain-policy",
        metavar="WHO",
        default=DrainPolicy.AFFECTED,
        group=options.EVICTIONS,
    )
    strategy: DrainStrategy = options.choice(
        "if budgets allow only some evictions: rolling starts with these, whole waits for all",
        name="drain-strategy",
        metavar="HOW",
        default=DrainStrategy.ROLLING,
        group=options.EVICTIONS,
    )
    is_forced: bool = options.switch(
        "delete pods that remain at the drain's deadline, ignoring PodDisruptionBudgets",
        name="force-drain",
        group=options.EVICTIONS,
    )
    plugin_configs: tuple[tuple[str, str], ...] = options.declare(
        options.Option(
            help="device-plugin config by layout, such as all-1g.5gb=sliced,*=whole",
            metavar="MAP",
            parse=parse_plugin_configs,
            default=(),
            default_text="unchanged",
            group=options.LAYOUTS,
        )
    )
    startup_taints: frozenset[str] = options.declare(
        options.Option(
            name="startup-taint",
            help="key of a taint to remove once the layout is verified; repeatable",
            metavar="KEY",
            parse=parse_startup_taint,
            default=frozenset(),
            is_repeatable=True,
            group=options.MANY_NODES,
        )
    )

    def plugin_config(self, layout: str) -> str | None:
        """Return the plugin config for a layout; None: do not change the label."""
        configs = dict(self.plugin_configs)
        return configs.get(layout, configs.get(_ANY_LAYOUT))
