"""What a config document says once it is read: layouts of rules, canonical and comparable."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping

from mig_manager import errors
from mig_manager.core import fields, model, yaml_tree
from mig_manager.core.layout import device_filter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One element of a layout: which GPUs, and what they shall have."""

    filters: tuple[device_filter.Filter, ...]
    """Any of them; empty: every model. Sorted, unique."""
    indices: tuple[int, ...] | None
    """Indices among all GPUs of the node, not among those filtered. None: all. Sorted, unique."""
    identities: tuple[str, ...] = ()
    """Further GPUs by UUID or PCI address, as ``model.Gpu`` has them. Sorted, unique."""
    wanted: model.WantedGpu
    location: errors.Location = dataclasses.field(compare=False)
    profile_locations: Mapping[model.Profile, errors.Location] = dataclasses.field(compare=False)
    """Where each profile is asked for."""
    filter_locations: Mapping[device_filter.Filter, errors.Location] = dataclasses.field(
        compare=False, default_factory=dict
    )
    """Where each filter is written."""

    def matches(self, gpu: model.Gpu) -> bool:
        """Tell whether the rule is about this GPU."""
        return self.filters_match(gpu) and (
            self.indices is None or gpu.index in self.indices or self.names(gpu)
        )

    def names(self, gpu: model.Gpu) -> bool:
        """Tell whether the rule names this very GPU by UUID or PCI address."""
        return gpu.uuid in self.identities or gpu.pci_address in self.identities

    def filters_match(self, gpu: model.Gpu) -> bool:
        """Tell whether the rule is about GPUs of this model."""
        return not self.filters or any(each.matches(gpu) for each in self.filters)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A named wish for the GPUs of a node."""

    name: str
    rules: tuple[Rule, ...]
    """In the order of the file: of rules about the same GPU, the last decides."""
    content_hash: str
    """12 hexadecimal digits that change exactly when the meaning of the rules does."""
    is_lenient: bool = dataclasses.field(default=False, compare=False)
    """Whether what matches no GPU passes, as the peer lets it."""
    location: errors.Location = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All layouts of a config file, in its order."""

    source: str
    layouts: Mapping[str, Layout]
    warnings: tuple[yaml_tree.Remark, ...] = dataclasses.field(default=(), compare=False)
    """What a lenient reader let pass, in the order of the file."""
    extensions: tuple[yaml_tree.Remark, ...] = dataclasses.field(default=(), compare=False)
    """What the peer would not understand, in the order of the file."""

    def layout(self, name: str) -> Layout:
        """Return the layout of that name.

        Raises:
            LayoutError: There is none (UNKNOWN_CONFIG); the message names close matches.
        """
        if name in self.layouts:
            return self.layouts[name]
        raise errors.LayoutError(
            f"{self.source} has no layout '{name}' among its {len(self.layouts)}"
            f"{fields.did_you_mean(name, self.layouts)}",
            reason=errors.Reason.UNKNOWN_CONFIG,
        )


def content_hash(rules: Iterable[Rule]) -> str:
    """Return a hash of what the rules mean; what is not used does not enter it.

    Nodes carry it in their status: it must stay the same from release to release.
    """
    meaning = [
        (
            [str(each) for each in rule.filters],
            None if rule.indices is None else [*rule.indices, *rule.identities],
            rule.wanted.mode.value,
            [(str(each), count) for each, count in (*rule.wanted.devices, *rule.wanted.pins)],
        )
        for rule in rules
    ]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:12]
