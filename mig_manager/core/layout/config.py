"""The mig-parted v1 document: named layouts, each a list of rules about GPUs.

    version: v1
    mig-configs:
      <layout>:
      - device-filter: "0x20B010DE"   # optional; one or a list of 0xDDDDVVVV[:0xSSSSVVVV], names
        devices: all                  # or a list of GPU indices, UUIDs, PCI addresses
        mig-enabled: true
        mig-devices: {1g.5gb: 7}      # profile to count; 1g.5gb@4: the one at memory slice 4

What NVIDIA's mig-parted reads is read here with the same meaning, with one exception: what it
reads without a word and then does something else than the author meant is an error. Such are a
key given twice, a ``device-filter`` that is no PCI id and no name, an index that is negative or
null, and a second YAML document behind the first; when GPUs are selected, an index that the node
lacks and a layout that is about none of them. A lenient reader lets all this pass with warnings.

Parsing normalises, so that ``==`` and ``content_hash`` compare what layouts mean, not how they
are spelled.
"""

from mig_manager.core import fields, yaml_tree
from mig_manager.core.layout import exporting, layouts, rules, selection

VERSION = "v1"

_DOCUMENT_KEYS = ("version", "mig-configs")

DeviceFilter = layouts.DeviceFilter
Rule = layouts.Rule
Layout = layouts.Layout
Document = layouts.Document
parse_filter = layouts.parse_filter
select = selection.select
export = exporting.export
"""The names by which those who only work with documents know them."""


def parse(text: str, *, source: str, is_lenient: bool = False) -> Document:
    """Read a config document; an empty one has no layouts.

    Args:
        text: YAML or JSON.
        source: Name of the file for error messages.
        is_lenient: Whether what the peer passes over without a word passes with a warning.

    Raises:
        ConfigError: The document breaks the format; the message says where and what is right.
    """
    remarked = yaml_tree.Remarks(is_lenient=is_lenient)
    root = yaml_tree.parse(text, source=source, remarks=remarked)
    read = {} if root is None or fields.is_null(root) else _layouts(root, remarked)
    return Document(
        source=source,
        layouts=read,
        warnings=yaml_tree.in_order(remarked.warnings),
        extensions=yaml_tree.in_order(remarked.extensions),
    )


def _layouts(root: yaml_tree.Node, remarked: yaml_tree.Remarks) -> dict[str, Layout]:
    if not isinstance(root, yaml_tree.Mapping):
        fields.fail(root, f"expected a mapping with 'version: {VERSION}' and 'mig-configs'")
    fields.check_keys(root, _DOCUMENT_KEYS)
    version = fields.required(root, "version", example=VERSION)
    if not (isinstance(version, yaml_tree.Scalar) and version.value == VERSION):
        fields.fail(version, f"version must be the text {VERSION}, not {fields.shown(version)}")
    configs = root.get("mig-configs")
    if configs is None:
        return {}
    if not (isinstance(configs, yaml_tree.Mapping) and configs.entries):
        fields.fail(
            configs, f"mig-configs must map layout names to rules, not {fields.shown(configs)}"
        )
    return {entry.key: _layout(entry, remarked) for entry in configs.entries}


def _layout(entry: yaml_tree.Entry, remarked: yaml_tree.Remarks) -> Layout:
    if not (isinstance(entry.value, yaml_tree.Sequence) and entry.value.items):
        fields.fail(entry.value, f"layout '{entry.key}' must be a list of rules (- devices: ...)")
    read = tuple(rules.read(item, remarked) for item in entry.value.items)
    return Layout(
        name=entry.key,
        rules=read,
        content_hash=layouts.content_hash(read),
        is_lenient=remarked.is_lenient,
        location=entry.location,
    )
