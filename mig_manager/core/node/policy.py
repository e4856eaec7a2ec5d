"""What the owner of a node decides about changes: who leaves, and how new devices are shared.

**Time slicing beside MIG.** The device plugin offers each device several times over when its
config says so, and it picks that config by the node label ``nvidia.com/device-plugin.config``. A
config that suits one layout is wrong for the next, so the label should change with the layout:
``--plugin-configs all-1g.5gb=sliced,all-7g.40gb=whole,*=default`` maps names of layouts to names
of plugin configs, and ``*`` stands for every layout that is not named. Without ``*`` such a
layout leaves the label as it is.

The label is written together with the plugin's release, so that the new plugin reads the new
config at its start; a run that does not end in success puts back what was there before.
"""

import dataclasses
import enum
import re
from collections.abc import Mapping

from mig_manager import errors

_ANY_LAYOUT = "*"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class Drain(enum.Enum):
    """Whom a change sends away."""

    AFFECTED = "affected"
    """The pods that hold what the change destroys."""
    NODE = "node"
    """Every pod of the node that has or wants a GPU."""
    NONE = "none"
    """Nobody: the change waits until the affected pods have left by themselves."""


class DrainStrategy(enum.Enum):
    """What a drain does where PodDisruptionBudgets grant only a part of its evictions."""

    ROLLING = "rolling"
    """Evict what they grant, and go on when they grant more, as ``kubectl drain`` does."""
    WHOLE = "whole"
    """Evict nobody until they grant all evictions together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The owner's decisions."""

    drain: Drain = Drain.AFFECTED
    strategy: DrainStrategy = DrainStrategy.ROLLING
    is_forced: bool = False
    """Whether pods that are still there at the deadline are deleted, budgets or not."""
    plugin_configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a layout, or ``*``, to the name of a device-plugin config."""

    def plugin_config(self, layout: str) -> str | None:
        """Return the plugin config that goes with a layout; None: leave it as it is."""
        return self.plugin_configs.get(layout, self.plugin_configs.get(_ANY_LAYOUT))


def parse_plugin_configs(text: str, *, origin: str) -> dict[str, str]:
    """Read ``layout=config,layout=config``; an empty text maps nothing.

    Args:
        text: The pairs.
        origin: The option, for error messages.

    Raises:
        UsageError: A pair is not one, names its layout again, or its config can be no label.
    """
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        layout, equals, config = (part.strip() for part in pair.partition("="))
        if not (layout and equals and _LABEL_VALUE.fullmatch(config)):
            raise errors.UsageError(
                f"{origin}: {pair!r} is not LAYOUT=CONFIG with a config name that can be a "
                "label's value"
            )
        if layout in found:
            raise errors.UsageError(f"{origin}: layout {layout!r} is named twice")
        found[layout] = config
    return found
