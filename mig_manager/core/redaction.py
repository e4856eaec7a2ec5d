"""Remove credentials from text that people attach to reports."""

import base64
import json
import re
import urllib.parse
from collections.abc import Iterable

REMOVED = "[removed]"
_FOLDERS = ("PWD", "OLDPWD")  # of a shell

_WORD = (
    r"(?:token|passw(?:or)?d|passphrase|secret|credential|authorization|bearer|cookie|signature"
    r"|(?:api|access|account|encryption|private|shared|signing)[_-]?key|tls\.key|dockerconfigjson"
    r"|client-key-data|client-certificate-data|(?<![a-z])(?:auth|pass|pwd|sessionid|sig)(?![a-z]))"
)
_NAME = rf"[\w.-]{{0,60}}{_WORD}[\w.-]{{0,60}}"
_MARK = r"""\\{0,9}["']?"""  # around a text of JSON, which may be within another
_LINE = re.compile(
    rf"""(?P<before>
      (?P<yaml>^[ \t\#-]{{0,99}}+{_NAME}:[ \t]+(?![|>"'\[{{]))  # a text without quotes
      | (?:authorization|cookie):[ \t]*
    )
    (?P<value>(?(yaml)[^\n]+|[^\n"'\\]+))""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
"""Where a value may have several words."""
_NAMED = re.compile(
    rf"""(?P<before>
      {_WORD} [\w.-]{{0,60}} (?P<mark>\\*["'])? \s*[:=]\s*
      | (?:authorization|cookie)["'],[ ]?(?=["'])  # a header of Python's
      | (?<![\w-])--{_NAME} (?:\\*["'],)? \s+  # an argument of its own
      # As a pod's variables are listed.
      | \bname{_MARK}\s*:\s*{_MARK}{_NAME}{_MARK},?\s*
        {_MARK}value(?P<quote>\\{{0,9}}["'])?\s*:\s*
    )
    (?P<value>
      [|>][-+\d]{{0,2}}[^\S\n]*\n (?P<indent>[ ]+)[^\n]*  # a block of YAML
        (?:\n(?:(?P=indent)[^\n]*|[ ]*(?=\n)))*
      | "(?:[^"\\\n]|\\.)*" | '[^'\n]*'  # a text of JSON, YAML or a shell
      | \[\s*(?:\\*["'][^"'\\\[\]]*\\*["'][\s,]*)+\]
      | \\+".*?\\{{1,9}}"  # of JSON within a text of JSON
      | (?:(?:bearer|basic|digest|negotiate|token)\s+)?
        \\*["']?(?:[^\s,;{{}}\[\]()"'\\]|[,;](?![\s,;{{}}\[\]()"'\\]|$))+
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
    re.compile(r"LS0tLS1CRUdJTi[\w+/=]*"),  # the same once more in Base64, as in a Secret
    # User and password, or a token, in a URL; but not the name of an image.
    re.compile(r"(?<=://)[^/:\s@\"']{0,100}(?::[^\s@\"']{1,300})?(?=@(?!sha))"),
    re.compile(r"(?:(?<=\s-u\s)|(?<=\s--user[\s=]))[^\s:\"']{1,200}:[^\s\"']+"),  # of curl
    # Tokens of GitHub, GitLab, Slack and NVIDIA.
    re.compile(r"\b(?:gh[a-z]_|github_pat_|glpat-|xox[a-z]-|nvapi-)[\w-]{10,}"),
    # A JSON Web Token, with what it is joined to.
    re.compile(r"(?<![\w-])(?=[\w-]+\.[\w-]+\.)[\w-]*?\beyJ[\w-]+\.[\w-]+\.[\w-]*"),
    re.compile(r"(?<=\bbearer )[\w.~+/=-]+", re.IGNORECASE),
)
_LEAST = 6
"""Characters of a known secret: a shorter one would remove what only looks like it."""


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace known secrets and what looks like a credential; JSON stays JSON."""
    # Longest first: one secret may be part of another.
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _LEAST:
            in_base64 = base64.b64encode(secret.encode(errors="surrogateescape")).decode()
            in_url = urllib.parse.quote(secret, safe="", errors="surrogateescape")
            for form in (json.dumps(secret)[1:-1], secret, in_base64.rstrip("="), in_url):
                text = text.replace(form, REMOVED)
    text = _NAMED.sub(_replacement, _LINE.sub(_replacement, text))
    for pattern in _UNNAMED:
        text = pattern.sub(REMOVED, text)
    return text


def _replacement(found: re.Match[str]) -> str:
    # A number or a word behind a quoted key: JSON needs quotes around what replaces it.
    opening = _QUOTE.match(found["value"])
    groups = found.groupdict("")
    quote = opening[0] if opening else groups.get("mark") or groups.get("quote") or ""
    return f"{found['before']}{quote}{REMOVED}{quote}"


def values(text: str) -> tuple[str, ...]:
    """Return the secrets that a text names, such as the token in a kubeconfig."""
    found = (each for pattern in (_LINE, _NAMED) for each in pattern.finditer(text))
    return tuple(dict.fromkeys(each["value"].strip("\"'") for each in found))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name has a secret."""
    return name not in _FOLDERS and re.search(_WORD, name, re.IGNORECASE) is not None
