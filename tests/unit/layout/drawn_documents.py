"""Layout files drawn at random: any document, and texts that are nearly one."""

import re

from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.layout import gpu_selectors, layout_documents, layout_parser, layouts

SOURCE = "f.yaml"

PLACE = errors.Location(source=SOURCE, line=1, column=1)

WELL_FORMED = """\
# Every part of the grammar once.
version: v1
mig-configs:
  all-disabled:
  - devices: all
    mig-enabled: false
  balanced: &balanced
  - device-filter: ["0x20B010DE", "0x25B610DE:0x14A910DE", "NVIDIA H100*"]
    devices: [0, 1, GPU-0a1b2c3d-0000-4000-8000-00000000000f, "0000:3b:00.0"]
    mig-enabled: yes
    mig-devices:
      1g.5gb: 2
      "3g.20gb@4": 1
      1c.2g.10gb+me: 0
  - &rule {devices: 3, mig-enabled: true, mig-devices: {}}
  again: *balanced
  third:
  - <<: *rule
    devices: [7]
"""

WORDS = st.sampled_from(
    [
        *layout_parser.DOCUMENT_KEYS,
        *layout_parser.KEYS,
        *("all", "v1", "x", "", "0", "-1", "1.5", "~", "yes", "0x20B010DE", '"0x20B010DE"'),
        *("1g.5gb", "1g.5gb@4", "1c.3g.20gb@0", "1g.5gb+me", "bogus", "*a", "&a", "<<", "---"),
        *(": ", "- ", ", ", "[", "]", "{", "}", "\n", "\n  ", "\n    ", "#", "'", '"', "!!int "),
        *("\t", "\x00", "\ufeff", "\u2028", "é", "?", "|", ">", "%", "@", "`"),
    ]
)


_SPELLINGS = [
    *("all", "yes", "no", "true", "x", "*balanced", "&x", "0", "1", "07", "1g.5gb", "1c.2g.10gb"),
    *(
        "1g.10gb+me",
        "\n",
        "\n    ",
        " # a comment\n    ",
        "# another comment",
        "[",
        "]",
        ",",
        ", ",
    ),
]


def _shape(piece: str) -> str:
    """Return what pieces that may replace one another have in common."""
    return re.sub(r"[a-z]+", "a", re.sub(r"[0-9]+", "0", re.sub(r"#.*|\s+", " ", piece)))


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """Draw a document with one piece lost, doubled or replaced, or with two of them.

    About a third of them are still documents.
    """
    pieces = re.findall(r"#.*|[*&]?[\w.+-]+|\s+|.", text)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(pieces) - 1))
        alike = [each for each in (*pieces, *_SPELLINGS) if _shape(each) == _shape(pieces[at])]
        others = st.just(pieces[at] * 2) | WORDS | st.text(max_size=4)
        pieces[at] = draw(st.sampled_from(alike) if draw(st.integers(0, 3)) else others)
    return "".join(pieces)


PROFILES = st.builds(
    lambda compute, extra, memory, words, sign: model.Profile(
        compute_slices=compute,
        gpu_slices=compute + extra,
        memory_gb=memory,
        attributes=tuple(sorted(words)) if sign else (),
        negated_attributes=() if sign else tuple(sorted(words)),
    ),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 300),
    st.sets(st.sampled_from(["me", "me.all", "gfx", "ME", "a..b"]), max_size=2),
    st.booleans(),
)

PINS = st.builds(
    lambda profile, start: model.Pin(profile=profile, start=start), PROFILES, st.integers(0, 15)
)

UINT32 = st.integers(0, 2**32 - 1)

FILTERS = st.builds(
    lambda device, subsystem: gpu_selectors.PciIdFilter(device_id=device, subsystem_id=subsystem),
    UINT32,
    st.none() | UINT32,
) | st.sampled_from(["A100-SXM4-40GB", "NVIDIA H100*", "*", "rtx pro 6000 [a-z]*", "A?0"]).map(
    gpu_selectors.parse_filter
)

IDENTITIES = st.uuids().map(lambda each: f"GPU-{each}") | st.tuples(
    UINT32, st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)
).map(lambda part: f"{part[0]:08x}:{part[1]:02x}:{part[2]:02x}.{part[3]}")


@st.composite
def desired_gpus(draw: st.DrawFn) -> model.DesiredGpu:
    if not draw(st.booleans()):
        return model.DesiredGpu.of(model.MigMode.DISABLED, {})
    counts = draw(st.dictionaries(PROFILES, st.integers(1, 10**6), max_size=4))
    pins: dict[model.Pin, int] = {}
    for pin in draw(st.lists(PINS, max_size=4)):
        place = pin.profile.gpu_instance, pin.start
        if place not in {(other.profile.gpu_instance, other.start) for other in pins}:
            most = pin.profile.gpu_slices // pin.profile.compute_slices
            pins[pin] = draw(st.integers(1, most))
    return model.DesiredGpu.of(model.MigMode.ENABLED, counts, pins)


@st.composite
def a_rule(draw: st.DrawFn) -> layouts.Rule:
    is_all = draw(st.booleans())
    return layouts.Rule(
        filters=tuple(sorted(draw(st.sets(FILTERS, max_size=3)), key=str)),
        indices=None if is_all else tuple(sorted(draw(st.sets(st.integers(0, 99), max_size=4)))),
        identities=() if is_all else tuple(sorted(draw(st.sets(IDENTITIES, max_size=2)))),
        desired=draw(desired_gpus()),
        location=PLACE,
    )


# YAML knows no surrogate pairs, in which JSON writes the characters beyond these.
LABELS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=10)


@st.composite
def documents(draw: st.DrawFn) -> layout_documents.Document:
    named = draw(st.dictionaries(LABELS, st.lists(a_rule(), min_size=1, max_size=3), max_size=3))
    return layout_documents.Document(
        source=SOURCE,
        layouts={
            name: layouts.Layout(name=name, rules=tuple(members), location=PLACE)
            for name, members in named.items()
        },
    )


_ANY_VALUES: st.SearchStrategy[object] = st.recursive(
    st.sampled_from(["all", "v1", "*A100*", "1g.5gb", True, False, None, 0, 1, -1, 1.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*layout_parser.KEYS, "x", "1g.5gb@4"]), inner, max_size=3
        )
    ),
    max_leaves=4,
)


@st.composite
def rules_as_data(draw: st.DrawFn) -> dict[str, object]:
    """Draw what a rule of a layout file has, often with any value for one of its keys."""
    rule: dict[str, object] = {
        "device-filter": draw(FILTERS.map(str) | st.lists(FILTERS.map(str), min_size=1)),
        "devices": draw(st.just("all") | st.lists(st.integers(0, 99) | IDENTITIES, max_size=2)),
        "mig-enabled": True,
        "mig-devices": draw(st.dictionaries(PROFILES.map(str), st.integers(1, 9), max_size=2)),
    }
    if draw(st.booleans()):
        rule[draw(st.sampled_from([*layout_parser.KEYS, "x"]))] = draw(_ANY_VALUES)
    return rule
