"""The layouts of one layout file."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import messages, model
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import selection
from mig_manager.core.layout.layouts import Layout

VERSION = "v1"  # version of the format
_NAME_ANOTHER_FILE = "Name another file, or add layouts to it."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All layouts of a file, in its order."""

    source: str
    layouts: Mapping[str, Layout]
    warnings: tuple[yaml_diagnostics.Diagnostic, ...] = dataclasses.field(
        default=(), compare=False
    )
    extensions: tuple[yaml_diagnostics.Diagnostic, ...] = dataclasses.field(
        default=(), compare=False
    )
    """Uses of features that mig-parted does not support, in the order of the file."""
    is_presumed: bool = dataclasses.field(default=False, compare=False)
    """Whether no person named it: agents may have another file."""

    def layout(
        self, name: str, nodes: Sequence[Sequence[model.Gpu]] = (), *, remedy: str = ""
    ) -> Layout:
        """Return the layout of that name; LayoutError (UNKNOWN_CONFIG) names close matches.

        Of ``nodes``, each a list of GPUs, one must have the profiles of a match.
        """
        if name in self.layouts:
            return self.layouts[name]
        if not self.layouts and not self.is_presumed:
            raise errors.LayoutError(
                f"{self.source} has no layouts",
                reason=reasons.Reason.UNKNOWN_CONFIG,
                remedy=_NAME_ANOTHER_FILE,
            )
        hint = messages.did_you_mean(name, self.possible(nodes))
        raise errors.LayoutError(
            f"unknown layout '{name}' in {self.source}{hint}",
            reason=reasons.Reason.UNKNOWN_CONFIG,
            remedy=remedy,
        )

    def possible(self, nodes: Sequence[Sequence[model.Gpu]]) -> Sequence[str]:
        """Return the layouts with profiles that a node has, each a list of GPUs; or all."""
        return [
            each.name
            for each in self.layouts.values()
            if not nodes or any(selection.has_profiles(each, gpus) for gpus in nodes)
        ]

    def select(self, names: Sequence[str]) -> Sequence[Layout]:
        """Return the layouts of these names, or all.

        Raises:
            ConfigError: The document has no layouts.
            LayoutError: A name is unknown (UNKNOWN_CONFIG).
        """
        if not self.layouts:
            problem = f"{self.source} has no layouts"
            raise errors.ConfigError(problem, remedy=_NAME_ANOTHER_FILE)
        return [self.layout(name) for name in names or self.layouts]


def render(layouts: Iterable[Layout]) -> dict[str, object]:
    """Return the document with these layouts as plain data, in the form that mig-parted writes."""
    configs: dict[str, list[dict[str, object]]] = {}
    for layout in layouts:
        configs[layout.name] = []
        for rule in layout.rules:
            filters = list(map(str, rule.filters))
            first = {"device-filter": filters[0] if len(filters) == 1 else filters}
            instances = (*rule.desired.devices, *rule.desired.pins)
            configs[layout.name].append(
                (first if filters else {})
                | {
                    "devices": "all"
                    if rule.indices is None
                    else [*rule.indices, *rule.identities],
                    "mig-enabled": rule.desired.mode is model.MigMode.ENABLED,
                    "mig-devices": {str(each): count for each, count in instances},
                }
            )
    return {"version": VERSION} | ({"mig-configs": configs} if configs else {})
