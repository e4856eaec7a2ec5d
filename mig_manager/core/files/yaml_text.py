"""Parse and write YAML: the only module that uses the YAML library.

``parse`` returns a ``yaml_tree``. Scalars are read as in YAML 1.1 (``yes`` is true) and by
mig-parted; JSON is parsed as YAML. The tree is built from parser events, which bounds depth and
size while parsing.
"""

from collections.abc import Callable
from typing import Any

import yaml

from mig_manager import errors
from mig_manager.core.files import yaml_diagnostics, yaml_tree

MAX_CHARACTERS = 2**20  # what a ConfigMap can hold
MAX_DEPTH = 32
MAX_NODES = 100_000  # counted with aliases expanded: a few lines can stand for billions of nodes

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_YAML = "tag:yaml.org,2002:"
_QUOTE = "; a text that begins with * takes quotes"
_INTEGER_BITS = 64  # a larger number is neither a count nor an index


def parse(
    text: str, *, source: str, diagnostics: yaml_diagnostics.Diagnostics | None = None
) -> yaml_tree.Node | None:
    """Parse one YAML document; None if it has only white space and comments.

    ``diagnostics`` collects duplicate keys as errors, or as warnings if it is lenient; the last
    key counts. A lenient one ignores a second document.

    Raises:
        ConfigError: Invalid YAML, too large, an alias without anchor, a tag beyond plain data;
            unless lenient also a second document with content; without ``diagnostics`` also a
            duplicate key.
    """
    if diagnostics is None:
        strict = yaml_diagnostics.Diagnostics()
        root = parse(text, source=source, diagnostics=strict)
        strict.raise_errors()
        return root
    _check_characters(text, source)
    loader = _Loader(text)
    try:
        return _Reader(loader, source, diagnostics).document()
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        # *A100* is meant as a glob, and YAML reads an alias.
        hint = _QUOTE if "alias" in (getattr(error, "context", None) or "") else ""
        mark = getattr(error, "problem_mark", None)
        if mark is not None and text[mark.index : mark.index + 1] == "\t":
            hint = "; indent with spaces, not with a tab"
        location = _locate(mark, source)
        raise errors.ConfigError(
            f"not readable as YAML: {problem}{hint}", location=location
        ) from error
    finally:
        loader.dispose()


def _check_characters(text: str, source: str) -> None:
    if len(text) > MAX_CHARACTERS:
        problem = f"{len(text)} characters; more than {MAX_CHARACTERS} are not read"
        raise errors.ConfigError(problem, location=_locate(None, source))
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match is not None:
        before = text[: match.start()]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise errors.ConfigError(
            f"character U+{ord(match[0]):04X} is not allowed in YAML",
            location=errors.Location(source=source, line=line, column=column),
        )


def _locate(mark: yaml.Mark | None, source: str) -> errors.Location:
    # The library's marks count from 0.
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return errors.Location(source=source, line=line, column=column)


class _Reader:
    """Builds the tree from parser events; an anchor ends before its alias: no cycles."""

    def __init__(
        self, loader: Any, source: str, diagnostics: yaml_diagnostics.Diagnostics
    ) -> None:
        self._loader = loader  # its stubs leave every method that we call untyped
        self._source = source
        self._diagnostics = diagnostics
        self._anchors: dict[str, yaml_tree.Node] = {}
        self._nodes = 0

    def document(self) -> yaml_tree.Node | None:
        self._loader.get_event()  # start of the stream
        if self._loader.check_event(yaml.StreamEndEvent):
            return None
        root = self._whole()
        place = _locate(self._loader.peek_event().start_mark, self._source)
        try:
            self._refuse_more()
        except (errors.ConfigError, yaml.YAMLError):
            # mig-parted ignores a second document, even invalid YAML.
            if not self._diagnostics.is_lenient:
                raise
            problem = "a second document starts here"
            self._diagnostics.doubt(place, problem, passes="it is not read")
        return root

    def _refuse_more(self) -> None:
        while not self._loader.check_event(yaml.StreamEndEvent):
            place = _locate(self._loader.peek_event().start_mark, self._source)
            if not yaml_tree.is_null(self._whole()):
                problem = "a second document starts here; put everything into the first"
                raise errors.ConfigError(problem, location=place)

    def _whole(self) -> yaml_tree.Node:
        self._anchors.clear()
        self._loader.get_event()  # start of the document
        root = self._node(depth=1)
        self._loader.get_event()  # its end
        return root

    def _node(self, *, depth: int) -> yaml_tree.Node:
        event = self._loader.get_event()
        location = _locate(event.start_mark, self._source)
        node: yaml_tree.Node
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                name = event.anchor
                raise errors.ConfigError(
                    f"undefined alias '*{name}': '&{name}' must end before it{_QUOTE}",
                    location=location,
                )
            node = self._anchors[event.anchor]
            nodes, height = _measure(node)
            self._check_size(nodes, depth + height - 1, location)
            return node
        self._check_size(1, depth, location)
        match event:
            case yaml.ScalarEvent():
                node = self._scalar(event, location)
            case yaml.SequenceStartEvent():
                _check_tag(event.tag, "seq", location)
                items: list[yaml_tree.Node] = []
                while not self._loader.check_event(yaml.SequenceEndEvent):
                    items.append(self._node(depth=depth + 1))
                self._loader.get_event()
                node = yaml_tree.Sequence(items=tuple(items), location=location)
            case _:
                _check_tag(event.tag, "map", location)
                node = self._mapping(depth, location)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _check_size(self, nodes: int, depth: int, location: errors.Location) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} values, aliases expanded"
            raise errors.ConfigError(problem, location=location)
        if depth > MAX_DEPTH:
            raise errors.ConfigError(f"more than {MAX_DEPTH} levels deep", location=location)

    def _mapping(self, depth: int, location: errors.Location) -> yaml_tree.Mapping:
        entries: dict[str, yaml_tree.Entry] = {}
        merged: dict[str, yaml_tree.Entry] = {}
        while not self._loader.check_event(yaml.MappingEndEvent):
            first = self._loader.peek_event()
            place = _locate(first.start_mark, self._source)
            is_merge = isinstance(first, yaml.ScalarEvent) and self._tag(first) == "merge"
            named = self._node(depth=depth + 1)
            key = named.key if isinstance(named, yaml_tree.Scalar) else None
            if key is None:
                raise errors.ConfigError("a key must be a text", location=place)
            value = self._node(depth=depth + 1)
            if is_merge:
                for part in value.items if isinstance(value, yaml_tree.Sequence) else (value,):
                    if not isinstance(part, yaml_tree.Mapping):
                        problem = "'<<' takes a mapping or a list of mappings"
                        raise errors.ConfigError(problem, location=part.location)
                    for entry in part.entries:
                        merged.setdefault(entry.key, entry)
                continue
            if key in entries:
                first_line = entries[key].location.line
                self._diagnostics.doubt(
                    place,
                    f"key '{key}' is given twice; the first is in line {first_line}",
                    passes="the last one counts",
                )
            entries[key] = yaml_tree.Entry(key=key, value=value, location=place)
        self._loader.get_event()
        return yaml_tree.Mapping(entries=tuple({**merged, **entries}.values()), location=location)

    def _tag(self, event: yaml.ScalarEvent) -> str:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        return str(tag).removeprefix(_YAML)

    def _scalar(self, event: yaml.ScalarEvent, location: errors.Location) -> yaml_tree.Scalar:
        tag = self._tag(event)
        if tag not in _RESOLVERS:
            raise _bad_tag(tag, location)
        try:
            value = _RESOLVERS[tag](event.value)
        except (KeyError, ValueError) as error:
            problem = f"{event.value[:60]!r} cannot be read as {tag}"
            raise errors.ConfigError(problem, location=location) from error
        return yaml_tree.Scalar(value=value, text=event.value, location=location)


def _measure(node: yaml_tree.Node) -> tuple[int, int]:
    """Return how many nodes a walk over the tree visits, and how many levels deep it goes."""
    match node:
        case yaml_tree.Scalar():
            return 1, 1
        case yaml_tree.Sequence():
            children = node.items
        case _:
            children = tuple(entry.value for entry in node.entries)
    parts = [_measure(child) for child in children]
    return 1 + sum(nodes for nodes, _ in parts), 1 + max((high for _, high in parts), default=0)


def _check_tag(tag: str | None, expected: str, location: errors.Location) -> None:
    if tag not in (None, "!", _YAML + expected):
        raise _bad_tag(str(tag).removeprefix(_YAML), location)


def _bad_tag(tag: str, location: errors.Location) -> errors.ConfigError:
    return errors.ConfigError(f"tag '{tag}' has no meaning here; leave it out", location=location)


def _integer(text: str) -> int | str:
    # 1:30 is ninety in YAML 1.1; other readers of these documents do not take it for a number.
    if ":" in text:
        return text
    digits = text.replace("_", "").lower()
    magnitude = digits.lstrip("+-")
    is_octal = len(magnitude) > 1 and magnitude[0] == "0" and magnitude[1].isdigit()
    value = int(digits, 8 if is_octal else 0)
    if value.bit_length() > _INTEGER_BITS:
        raise ValueError(text)
    return value


def _real(text: str) -> float | str:
    if ":" in text:
        return text
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


_RESOLVERS: dict[str, Callable[[str], str | int | float | bool | None]] = {
    "str": str,
    "timestamp": str,  # a layout may be named after a day
    "value": str,  # a lone "="
    "merge": str,
    "bool": lambda text: yaml.SafeLoader.bool_values[text.lower()],
    "int": _integer,
    "float": _real,
    "null": lambda _: None,
}


def dump(data: object) -> str:
    """Write plain data as YAML: blocks, lists of scalars on one line, keys in their order."""
    text: str = yaml.dump(
        data,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=2**20,
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Writes without aliases, as mig-parted does."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, data: list[object] | tuple[object, ...]) -> yaml.Node:
    is_flat = not any(isinstance(item, dict | list | tuple) for item in data)
    return dumper.represent_sequence(_YAML + "seq", data, flow_style=is_flat)


def _represent_str(dumper: Any, data: str) -> yaml.Node:
    reads_as = dumper.resolve(yaml.ScalarNode, data, (True, False))
    # In its own style the library loses line breaks of the rarer kinds.
    is_plain = data and data.isprintable() and reads_as == _YAML + "str"
    style = None if is_plain else '"'
    node: yaml.Node = dumper.represent_scalar(_YAML + "str", data, style=style)
    return node


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)
_Dumper.add_representer(str, _represent_str)
