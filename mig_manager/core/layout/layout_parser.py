"""The mig-parted v1 document: named layouts, each a list of rules about GPUs.

    version: v1
    mig-configs:
      <layout>:
      - device-filter: "0x20B010DE"   # optional; one or a list of 0xDDDDVVVV[:0xSSSSVVVV], names
        devices: all                  # or a list of GPU indices, UUIDs, PCI addresses
        mig-enabled: true
        mig-devices: {1g.5gb: 7}      # profile to count; 1g.5gb@4: the one at memory slice 4

A document has the same meaning as for NVIDIA's mig-parted. But input that mig-parted silently
misinterprets is an error: a duplicate key, a ``device-filter`` that is neither a PCI id nor a
name, a negative or null index, and a second YAML document. When GPUs are selected, so are an index
that the node lacks, and a layout that selects no GPU. Lenient parsing warns instead.

Parsing normalises, so that ``==`` and ``content_hash`` compare the meaning of layouts.
"""

import re
from collections.abc import Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model, profile_name
from mig_manager.core.files import yaml_diagnostics, yaml_fields, yaml_text, yaml_tree
from mig_manager.core.layout import gpu_selectors, layout_documents, layouts

DOCUMENT_KEYS = ("version", "mig-configs")
KEYS = ("device-filter", "devices", "mig-enabled", "mig-devices")
_OTHER_FILES = {
    "systemd-services": "a GPU clients file (--gpu-clients-file)",
    "hooks": "a hooks file (--hooks-file)",
}
"""By the key that only such a file has."""
_NAME_LAYOUTS = "Name a file with 'mig-configs'."


def parse(text: str, *, source: str, is_lenient: bool = False) -> layout_documents.Document:
    """Parse a layout file; an empty one has no layouts.

    If lenient, warn about input that mig-parted ignores.

    Raises:
        ConfigError: The document has an error. It names the first one with location and remedy,
            and has the messages of the others.
    """
    diagnostics = yaml_diagnostics.Diagnostics(is_lenient=is_lenient)
    parsed: dict[str, layouts.Layout] = {}
    with diagnostics.continuing():
        root = yaml_text.parse(text, source=source, diagnostics=diagnostics)
        if root is not None and not yaml_tree.is_null(root):
            parsed = _layouts(root, diagnostics)
    diagnostics.raise_errors()
    return layout_documents.Document(
        source=source,
        layouts=parsed,
        warnings=yaml_diagnostics.in_order(diagnostics.warnings),
        extensions=yaml_diagnostics.in_order(diagnostics.extensions),
    )


def _layouts(
    root: yaml_tree.Node, diagnostics: yaml_diagnostics.Diagnostics
) -> dict[str, layouts.Layout]:
    if not isinstance(root, yaml_tree.Mapping):
        yaml_fields.fail(
            root,
            f"expected a mapping with 'version: {layout_documents.VERSION}' and 'mig-configs'",
        )
    _check_kind(root)
    _check_keys(root, DOCUMENT_KEYS, {"version": layout_documents.VERSION}, diagnostics)
    if version := root.get("version"):
        with diagnostics.continuing():
            yaml_fields.check_version(version, layout_documents.VERSION)
    configs = root.get("mig-configs")
    if configs is None:
        return {}
    if not (isinstance(configs, yaml_tree.Mapping) and configs.entries):
        problem = f"mig-configs must map layout names to rules, not {yaml_fields.shown(configs)}"
        yaml_fields.fail(configs, problem)
    parsed: dict[str, layouts.Layout] = {}
    for entry in configs.entries:
        with diagnostics.continuing():
            parsed[entry.key] = _layout(entry, diagnostics)
    return parsed


def _check_kind(root: yaml_tree.Mapping) -> None:
    """Raise a ConfigError if the document is not of the kind that its user thinks."""
    kind = root.get("kind")
    if kind is not None and root.get("apiVersion") is not None:
        what = kind.text[:60] if isinstance(kind, yaml_tree.Scalar) else "object"
        raise errors.ConfigError(
            f"this is a Kubernetes {what}, not a layout file",
            location=root.location,
            remedy=_how_to_extract(root) if what == "ConfigMap" else _NAME_LAYOUTS,
        )
    for entry in root.entries:
        if entry.key in _OTHER_FILES:
            problem = f"this is {_OTHER_FILES[entry.key]}, not a layout file"
            raise errors.ConfigError(problem, location=entry.location, remedy=_NAME_LAYOUTS)


def _how_to_extract(config_map: yaml_tree.Mapping) -> str:
    data = config_map.get("data")
    keys = [entry.key for entry in data.entries] if isinstance(data, yaml_tree.Mapping) else []
    key = next((key for key in keys if re.fullmatch(r"[-._a-zA-Z0-9]+", key)), "config.yaml")
    path = key.replace(".", r"\.")
    return (
        f"Name a file with only the text of data.{key}; from a cluster: kubectl get configmap "
        f"NAME -n NAMESPACE -o jsonpath='{{.data.{path}}}' > layouts.yaml"
    )


def _layout(entry: yaml_tree.Entry, diagnostics: yaml_diagnostics.Diagnostics) -> layouts.Layout:
    if not (isinstance(entry.value, yaml_tree.Sequence) and entry.value.items):
        shown = yaml_fields.shown(entry.value)
        problem = f"layout '{entry.key}' must be a list of rules (- devices: ...), not {shown}"
        yaml_fields.fail(entry.value, problem)
    rules: list[layouts.Rule] = []
    for item in entry.value.items:
        with diagnostics.continuing():
            rules.append(_rule(item, diagnostics))
    return layouts.Layout(
        name=entry.key,
        rules=tuple(rules),
        is_lenient=diagnostics.is_lenient,
        location=entry.location,
    )


def _rule(node: yaml_tree.Node, diagnostics: yaml_diagnostics.Diagnostics) -> layouts.Rule:
    if not isinstance(node, yaml_tree.Mapping):
        shown = yaml_fields.shown(node)
        problem = f"a rule must be a mapping with 'devices' and 'mig-enabled', not {shown}"
        yaml_fields.fail(node, problem)
    _check_keys(node, KEYS, {"devices": "all", "mig-enabled": "true"}, diagnostics)
    filters: dict[gpu_selectors.Filter, errors.Location] = {}
    listed = node.get("device-filter")
    # Nothing, null, "" and [] all mean "every model" to mig-parted.
    is_any = isinstance(listed, yaml_tree.Scalar) and listed.value in (None, "")
    if listed is not None and not is_any:
        for item in listed.items if isinstance(listed, yaml_tree.Sequence) else (listed,):
            with diagnostics.continuing():
                filters.setdefault(_filter(item, diagnostics), item.location)
    indices: tuple[int, ...] | None = None
    identities: tuple[str, ...] = ()
    if gpus := node.get("devices"):
        with diagnostics.continuing():
            indices, identities = _gpus(gpus, diagnostics)
    mode: model.MigMode | None = None
    if enabled := node.get("mig-enabled"):
        with diagnostics.continuing():
            mode = _mode(enabled)
    desired, locations = _devices(node, mode, diagnostics)
    return layouts.Rule(
        # As text: None and a number do not compare.
        filters=tuple(sorted(filters, key=str)),
        filter_locations=filters,
        indices=indices,
        identities=identities,
        desired=desired,
        location=node.location,
        profile_locations=locations,
    )


def _check_keys(
    node: yaml_tree.Mapping,
    keys: Sequence[str],
    required: Mapping[str, str],
    diagnostics: yaml_diagnostics.Diagnostics,
) -> None:
    """Record unknown keys; without one, also missing keys, with an example of their value."""
    for entry in node.entries:
        with diagnostics.continuing():
            yaml_fields.check_key(entry, keys)
    if {entry.key for entry in node.entries} <= {*keys}:  # else the missing key may be misspelt
        for key, example in required.items():
            with diagnostics.continuing():
                yaml_fields.require(node, key, example=example)


def _filter(
    node: yaml_tree.Node, diagnostics: yaml_diagnostics.Diagnostics
) -> gpu_selectors.Filter:
    shown = yaml_fields.shown(node)
    if not (isinstance(node, yaml_tree.Scalar) and isinstance(node.value, str)):
        yaml_fields.fail(node, f"{shown} must be a text in quotes; {gpu_selectors.FILTER_HELP}")
    try:
        parsed = gpu_selectors.parse_filter(node.value)
    except ValueError as error:
        diagnostics.doubt(node.location, str(error), passes="it matches no GPU")
        return gpu_selectors.MATCHES_NOTHING
    if isinstance(parsed, gpu_selectors.NameFilter):
        diagnostics.extend(
            node.location,
            f"device-filter {shown} is a product name; nvidia-mig-parted supports only PCI ids "
            'such as "0x20B010DE"',
        )
    return parsed


def _gpus(
    node: yaml_tree.Node, diagnostics: yaml_diagnostics.Diagnostics
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    if isinstance(node, yaml_tree.Scalar):
        if node.value == "all":
            return None, ()
        if not isinstance(node.value, str):
            diagnostics.extend(
                node.location, f"devices is a single value; nvidia-mig-parted takes [{node.text}]"
            )
    items = node.items if isinstance(node, yaml_tree.Sequence) else (node,)
    gpus = [_gpu(item, diagnostics, is_alone=item is node) for item in items]
    indices = {each for each in gpus if isinstance(each, int)}
    identities = {each for each in gpus if isinstance(each, str)}
    return tuple(sorted(indices)), tuple(sorted(identities))


def _gpu(
    node: yaml_tree.Node, diagnostics: yaml_diagnostics.Diagnostics, *, is_alone: bool
) -> int | str | None:
    """Parse an index, a UUID or a PCI address; None if it can match no GPU."""
    value = node.value if isinstance(node, yaml_tree.Scalar) else None
    shown = yaml_fields.shown(node)
    neither = f"devices must be all, or a list of GPU indices, UUIDs or PCI addresses, not {shown}"
    if isinstance(value, str):
        identity = gpu_selectors.parse_identity(value)
        if identity is None:
            yaml_fields.fail(node, neither + _hint(value, is_alone=is_alone))
        problem = f"{shown} names a GPU; nvidia-mig-parted supports only indices"
        diagnostics.extend(node.location, problem)
        return identity
    number = yaml_fields.whole(node)
    problem = f"a GPU index must be a whole number, 0 or more, not {shown}"
    if yaml_tree.is_null(node) and not is_alone:
        diagnostics.doubt(node.location, problem, passes="it counts as 0")
        return 0
    if number is None:
        yaml_fields.fail(node, neither if is_alone else problem)
    if number < 0:
        diagnostics.doubt(node.location, problem, passes="it matches no GPU")
        return None
    return number


def _hint(text: str, *, is_alone: bool) -> str:
    if re.fullmatch(r"[0-9]{1,3}", text):
        return f"; did you mean {text}, without quotes?"
    if text.strip().lower() == "all":
        return "; did you mean 'devices: all'?"
    if text.startswith("MIG-"):
        return "; that is a MIG device, not a GPU"
    if text.lower().startswith("gpu-"):
        return "; a UUID is 'GPU-' and 32 hexadecimal digits with dashes, as 'status' shows it"
    return "; did you mean 'all'?" if is_alone and text.lower().startswith("al") else ""


def _mode(node: yaml_tree.Node) -> model.MigMode:
    value = node.value if isinstance(node, yaml_tree.Scalar) else node
    # To mig-parted, a key without a value is false.
    if value is None or value is False:
        return model.MigMode.DISABLED
    if value is not True:
        shown = yaml_fields.shown(node)
        yaml_fields.fail(node, f"mig-enabled must be true or false, without quotes, not {shown}")
    return model.MigMode.ENABLED


def _devices(
    rule: yaml_tree.Mapping, mode: model.MigMode | None, diagnostics: yaml_diagnostics.Diagnostics
) -> tuple[model.DesiredGpu, dict[model.Profile, errors.Location]]:
    """Return the desired state of a rule, and the locations of its profiles.

    ``mode`` is None if it is invalid.
    """
    node = rule.get("mig-devices")
    if (node is None or yaml_tree.is_null(node)) and mode is not model.MigMode.ENABLED:
        return model.DesiredGpu.of(model.MigMode.DISABLED, {}), {}
    if not isinstance(node, yaml_tree.Mapping):
        problem = "mig-devices must map profiles to counts when mig-enabled is true; {} for none"
        yaml_fields.fail(node or rule, problem)
    counts: dict[model.Profile, int] = {}
    pins: dict[model.Pin, int] = {}
    locations: dict[model.Profile, errors.Location] = {}
    errors_before = len(diagnostics.errors)
    for entry in node.entries:
        with diagnostics.continuing():
            profile, pin = _profile(entry, diagnostics)
            locations.setdefault(profile, entry.location)
            is_null = yaml_tree.is_null(entry.value)
            count = 0 if is_null else yaml_fields.natural(entry.value, f"the count of {entry.key}")
            if pin:
                pins[pin] = pins.get(pin, 0) + count
                _check_room(pin, pins, entry)
            else:
                # Two spellings of one profile add up, as in mig-parted.
                counts[profile] = counts.get(profile, 0) + count
    is_valid = len(diagnostics.errors) == errors_before
    if is_valid and node.entries and not (any(counts.values()) or any(pins.values())):
        yaml_fields.fail(node, "all counts in mig-devices are 0; write {} for no instances")
    if node.entries and mode is model.MigMode.DISABLED:
        yaml_fields.fail(node, "mig-devices must be empty when mig-enabled is false")
    return model.DesiredGpu.of(mode or model.MigMode.ENABLED, counts, pins), locations


def _profile(
    entry: yaml_tree.Entry, diagnostics: yaml_diagnostics.Diagnostics
) -> tuple[model.Profile, model.Pin | None]:
    name, at, start = entry.key.partition("@")
    try:
        profile = profile_name.parse(name)
    except ValueError as error:
        raise errors.ConfigError(str(error), location=entry.location) from None
    if not at:
        return profile, None
    return profile, model.Pin(profile=profile, start=_start(start, entry, diagnostics))


def _start(text: str, entry: yaml_tree.Entry, diagnostics: yaml_diagnostics.Diagnostics) -> int:
    diagnostics.extend(
        entry.location,
        f"'{entry.key}' has a placement; nvidia-mig-parted supports only profiles",
    )
    if not re.fullmatch(r"[0-9]{1,3}", text):
        raise errors.ConfigError(
            f"{entry.key[:60]!r}: after @ write the memory slice at which the instance starts, "
            "such as 1g.5gb@4",
            location=entry.location,
        )
    return int(text)


def _check_room(pin: model.Pin, pins: dict[model.Pin, int], entry: yaml_tree.Entry) -> None:
    whole = pin.profile.gpu_instance
    needed = sum(
        other.profile.compute_slices * count
        for other, count in pins.items()
        if (other.profile.gpu_instance, other.start) == (whole, pin.start)
    )
    if needed > whole.gpu_slices:
        raise errors.ConfigError(
            f"'{entry.key}': only one {whole} can start at memory slice {pin.start}, and it "
            f"has {whole.gpu_slices} compute slices, not {needed}",
            location=entry.location,
        )
