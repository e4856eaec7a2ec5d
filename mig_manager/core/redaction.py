"""Remove credentials from text that people attach to reports."""

import json
import re
from collections.abc import Iterable

REMOVED = "[removed]"

_WORD = (
    r"(?:token|passw(?:or)?d|secret|(?:api|access|private)[_-]?key|credential|authorization"
    r"|client-key-data|client-certificate-data)"
)
_NAME = rf"[\w.-]{{0,60}}{_WORD}[\w.-]{{0,60}}"
_MARK = r"""\\{0,9}["']?"""  # around a text of JSON, which may be within another
_NAMED = re.compile(
    rf"""(?P<before>
      {_WORD} [\w.-]{{0,60}} (?P<mark>\\*["'])? \s*[:=]\s*
      | (?<![\w-])--{_NAME} (?:\\*["'],)? \s+  # an argument of its own
      # As a pod's variables are listed.
      | \bname{_MARK}\s*:\s*{_MARK}{_NAME}{_MARK},?\s*
        {_MARK}value(?P<quote>\\{{0,9}}["'])?\s*:\s*
    )
    (?P<value>
      [|>][-+\d]{{0,2}}[^\S\n]*\n (?P<indent>[ ]+)[^\n]*  # a block of YAML
        (?:\n(?:(?P=indent)[^\n]*|[ ]*(?=\n)))*
      | "(?:[^"\\\n]|\\.)*" | '[^'\n]*'  # a text of JSON, YAML or a shell
      | \\+".*?\\+"  # of JSON within a text of JSON
      | (?:(?:bearer|basic|digest|negotiate|token)\s+)? \\*["']?[^\s,;{{}}\[\]()"'\\]+
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_QUOTE = re.compile(r"""\\*["']""")
# Each takes linear time, because hostile text must not keep the command busy.
_UNNAMED = (
    # A key or certificate in PEM; of one that is cut off, what looks like Base64.
    re.compile(
        r"-----BEGIN [^-\n]+-----"
        r"(?:(?:[^\"-]|-(?!----))*-----END [^-\n]+-----|(?:[\w+/=\s]|\\[nr])*)"
    ),
    re.compile(r"(?<=://)[^/:\s@\"']{0,200}:[^\s@\"']{1,400}(?=@)"),  # user and password in a URL
    re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"),  # a JSON Web Token
    re.compile(r"(?<=\bbearer )[\w.~+/=-]+", re.IGNORECASE),
)
_LEAST = 6
"""Characters of a known secret: a shorter one would remove what only looks like it."""


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace known secrets and what looks like a credential; JSON stays JSON."""
    # Longest first: one secret may be part of another.
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _LEAST:
            for form in (json.dumps(secret)[1:-1], secret):
                text = text.replace(form, REMOVED)
    text = _NAMED.sub(_replacement, text)
    for pattern in _UNNAMED:
        text = pattern.sub(REMOVED, text)
    return text


def _replacement(found: re.Match[str]) -> str:
    # A number or a word behind a quoted key: JSON needs quotes around what replaces it.
    opening = _QUOTE.match(found["value"])
    quote = opening[0] if opening else found["mark"] or found["quote"] or ""
    return f"{found['before']}{quote}{REMOVED}{quote}"


def values(text: str) -> tuple[str, ...]:
    """Return the secrets that a text names, such as the token in a kubeconfig."""
    return tuple(found["value"].strip("\"'") for found in _NAMED.finditer(text))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name has a secret."""
    return re.search(_WORD, name, re.IGNORECASE) is not None
