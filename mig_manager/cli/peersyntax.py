"""Spellings that NVIDIA's tools take, because Go's flags are written so, and argparse does not.

``-config-file F`` is ``--config-file F``, and a switch may have its value with it:
``--skip-reset=false``. Read as argparse reads it, the first would be ``-c`` with the layout
``onfig-file``.
"""

from collections.abc import Iterator, Sequence

_LONG = frozenset(
    {
        "checkpoint-file",
        "config-file",
        "config-label",
        "debug",
        "help",
        "hooks-file",
        "mode-only",
        "output-file",
        "output-format",
        "selected-config",
        "skip-reset",
        "valid-config",
        "version",
    }
)
"""Long names of ``nvidia-mig-parted`` (v0.15)."""
_SWITCHES = {
    "--debug": "debug",
    "--mode-only": "mode_only",
    "--skip-reset": "skip_reset",
    "--valid-config": "valid_config",
    "-a": "valid_config",
    "-d": "debug",
    "-m": "mode_only",
    "-s": "skip_reset",
}
"""Its switches, and the names that their values have here."""


def normal(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line as argparse reads it, and what its switches were set to.

    A switch with a value stays in the command line without it, so that a command that does not
    have the switch still refuses it; the value, last one first, is then the caller's to put in.

    Args:
        argv: The arguments of a command that has the names of ``nvidia-mig-parted``.
    """
    told: dict[str, str] = {}
    return list(_normal(argv, told)), told


def _normal(argv: Sequence[str], told: dict[str, str]) -> Iterator[str]:
    for position, word in enumerate(argv):
        if word == "--":
            yield from argv[position:]
            return
        name, equals, value = _dashed(word).partition("=")
        switch = _SWITCHES.get(name)
        if switch is None:
            yield _dashed(word)
            continue
        # Of a switch that is given twice the last decides.
        told.pop(switch, None)
        if equals:
            told[switch] = value
        yield name


def _dashed(word: str) -> str:
    """Return a long name behind one dash as one behind two."""
    name = word.partition("=")[0].removeprefix("-")
    return f"-{word}" if word.startswith("-") and name in _LONG else word
