"""The JSON Schema of a layout file, for editors.

It is of draft 7, and its keywords mean the same in later drafts: many releases of
yaml-language-server know no later one (its README: "Supports JSON Schema 7 and below").
It refuses what it can express of the parser's errors, and nothing that the strict parser accepts.
"""

import re
from typing import Any

from mig_manager.core import profile_name
from mig_manager.core.layout import gpu_selectors, layout_documents, layout_parser

_UINT32 = (
    r"(0[xX](?=[0-9A-Fa-f_])(_?0)*(_?[0-9A-Fa-f]){0,8}|0[bB][01_]+|0[oO]?[0-7_]*|[1-9][0-9_]*)"
)
_FOLDED = r"\u0080-\uFFFF"  # letters that fold to others; the parser knows which
_NAME = (
    r"^(?!0[xX])(?![0-9A-Fa-f]{8}(?![0-9A-Za-z]))(?=[\s\S]*[A-Za-z*?" + _FOLDED + r"])"
    r"[A-Za-z0-9*?\[" + _FOLDED + r"][A-Za-z0-9./()*?\[\]!\s_" + _FOLDED + r"-]*$"
)
_ZERO = {"enum": [0, None]}


def schema() -> dict[str, Any]:
    """Return the schema."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "LayoutFile",
        "description": "MIG layouts for mig-manager and nvidia-mig-parted. Empty: none.",
        "type": ["object", "null"],
        "properties": {
            "version": {"const": layout_documents.VERSION},
            "mig-configs": {
                "description": "Layouts by name, which is the value of the node's label.",
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {
                    "description": "Rules; the last one that selects a GPU decides.",
                    "type": "array",
                    "minItems": 1,
                    "items": {"$ref": "#/definitions/rule"},
                },
            },
        },
        "required": ["version"],
        "additionalProperties": False,
        "definitions": {"rule": _rule(), "filter": _filter(), "gpu": _gpu()},
    }


def _rule() -> dict[str, Any]:
    rule: dict[str, Any] = {
        "type": "object",
        "properties": {
            "device-filter": {
                "description": "GPU models by PCI id, or by name or glob; none: every model.",
                "anyOf": [
                    {"enum": ["", None]},
                    {"$ref": "#/definitions/filter"},
                    {"type": "array", "items": {"$ref": "#/definitions/filter"}},
                ],
            },
            "devices": {
                "description": "GPUs of these models: all, or indices, UUIDs, PCI addresses.",
                "anyOf": [
                    {"const": "all"},
                    {"$ref": "#/definitions/gpu"},
                    {"type": "array", "items": {"$ref": "#/definitions/gpu"}},
                ],
            },
            "mig-enabled": {"description": "Empty is false.", "type": ["boolean", "null"]},
            "mig-devices": {
                "description": "Instances by profile; profile@slice sets the memory slice.",
                "type": ["object", "null"],
                "propertyNames": {
                    "pattern": _profile(),
                    # Understood by VS Code and yaml-language-server, ignored by others.
                    "patternErrorMessage": "Not a MIG profile, such as 1g.5gb or 1g.5gb@4.",
                },
                "additionalProperties": {"type": ["integer", "null"], "minimum": 0},
            },
        },
        "required": ["devices", "mig-enabled"],
        "additionalProperties": False,
        "if": {"properties": {"mig-enabled": {"const": True}}},
        "then": {
            "required": ["mig-devices"],
            "properties": {
                "mig-devices": {
                    "type": "object",
                    "anyOf": [{"maxProperties": 0}, {"not": {"additionalProperties": _ZERO}}],
                }
            },
        },
        "else": {"properties": {"mig-devices": {"maxProperties": 0}}},
    }
    if set(rule["properties"]) != set(layout_parser.KEYS):
        raise ValueError("the schema of a rule lacks a key of the parser, or has one too many")
    return rule


def _filter() -> dict[str, Any]:
    return {
        "type": "string",
        "anyOf": [{"pattern": f"^{_UINT32}(:{_UINT32})?$"}, {"pattern": _NAME}],
        "examples": ["0x20B010DE", "*A100*"],
    }


def _gpu() -> dict[str, Any]:
    uuid, address = (
        _any_case(each.pattern) for each in (gpu_selectors.UUID, gpu_selectors.ADDRESS)
    )
    return {
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "anyOf": [{"pattern": f"^{uuid}$"}, {"pattern": f"^{address}$"}]},
        ]
    }


def _profile() -> str:
    attribute = profile_name.ATTRIBUTE.pattern
    plain = _plain(profile_name.PROFILE.pattern)
    name = plain.replace("[A-Za-z0-9.,]+", f"{attribute}(,{attribute})*")
    if name == plain:
        raise ValueError("the grammar of attributes is no longer a part of the profiles'")
    return f"^{name}(@[0-9]{{1,3}})?$"


def _any_case(pattern: str) -> str:
    return _plain(pattern).replace("a-f", "A-Fa-f").replace("GPU", "[Gg][Pp][Uu]")


def _plain(pattern: str) -> str:
    """Return a pattern without Python's named groups, as ECMA 262 has it."""
    return re.sub(r"\(\?P<\w+>", "(", pattern)
