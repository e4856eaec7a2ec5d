"""Remove credentials from text that people attach to reports, by name and by appearance.

No pattern finds every credential. Every pattern takes linear time, so that hostile text cannot
keep the command busy.
"""

import base64
import json
import re
import urllib.parse
from collections.abc import Iterable

REMOVED = "[removed]"
_FOLDERS = ("PWD", "OLDPWD")  # a shell sets them

_WORD = (
    r"(?:token(?<!max[_-]token)(?<!automountserviceaccounttoken)(?!iz)"
    r"|passw(?:or)?d|passphrase|passcode"
    r"|secret|credential|authorization|bearer|cookie|signature|bindpw|requirepass"
    r"|(?:api|access|account|encryption|license|private|shared|signing)[_-]?key|tls\.key"
    r"|dockerconfigjson|client-key-data|client-certificate-data"
    r"|(?<![a-z])(?:auth|pass|pwd|pw|sessionid|sig)(?![a-z])"
    r"|(?<![a-z])(?:admin|db|ftp|ldap|mysql|pg|redis|root|smtp|ssh|sudo|user)(?:pass|pwd)(?![a-z]))"
)
_ABOUT = ("dir", "file", "mode", "name", "namespace", "path", "provider", "ref", "seconds", "url")
_REST = rf"[\w.-]{{0,60}}{''.join(f'(?<!{each})' for each in _ABOUT)}"
"""The rest of a name after its secret word; a credential's file, name or lifetime is no secret."""
_NAME = rf"[\w.-]{{0,60}}{_WORD}{_REST}"
_MARK = r"""\\{0,9}["']?"""  # around a text of JSON, which may be within another
_NEXT = r"""(?:\\*["']\s*,\s*|[^\S\n]+(?:\\\n\s*)?)"""  # between arguments, also of a list
_KEY = r"[^\n]*:(?:\s|\Z)"  # a key of a mapping in YAML
_FOLDED = r"\\?\n(?=[ \t\n])"  # a text goes on in a line of YAML that is indented or empty
_QUOTED = r"""
      "(?:[^"\\\n]|\\[^\n])*+" | '(?:[^'"\\\n]|\\[^"\n]|'')*+' | '[^'\n]*'
      | \\+".*?\\{1,9}"  # JSON within a text of JSON
      | ["'](?=\w)[^"'\n]*(?=\n|\Z)  # cut off
"""
_SPACE = r"(?:\s|\\{1,9}[nrt])"  # also of a JSON text within another
_CLOSED = rf"""
      (?P<escape>\\*+)(?P<closing>["']) (?:
        {_SPACE}*+ [,:\}}\]] (?:
          {_SPACE} | [,:\{{\}}\[\]]
          | (?:-?\d[\d.eE+-]{{0,99}}+|true|false|null)(?={_SPACE}*+[,\}}\]])
        )*+ (?:\Z|(?P=escape)(?P=closing)|(?!(?P=escape))\\*["'])
        | (?!(?P=escape))\\*["']  # the end of a text around
      )
"""
"""The end of a text of JSON, such as one that ends with ``token:``: no value begins there."""
_LINE = re.compile(
    rf"""(?P<before>
      (?P<yaml>^(?P<lead>[ \t]{{0,99}}+)[ \t\#-]{{0,9}}+(?=[\w.-]+:[ \t]){_NAME}:
        [ \t]+(?![|>\[{{]))
      | (?:authorization|cookie):[ \t]*
    )
    (?P<value>(?(yaml)(?:
      "(?:[^"\\\n]|\\[^\n]|{_FOLDED})*+" | '(?:[^'\n]|''|{_FOLDED})*+'
      | (?!["'])[^\n]+ (?:\n(?P=lead)[ \t]+(?!{_KEY})[^\n]+)*  # a text without quotes
    ) | [^\n"'\\]+))""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
"""Values that may have several words."""
_NAMED = re.compile(
    rf"""(?P<before>
      {_WORD}{_REST} (?P<mark>\\*["'])? (?:
        \s*[:=][^\S\n]*
        | :[^\S\n]*\n[^\S\n]+(?!-[ ]|{_KEY})
      )
      | (?:authorization|cookie)["'],[ ]?(?=["'])  # a header of Python's
      | (?<![\w-])--{_NAME}{_NEXT}  # an argument of its own
      # As a pod's variables are listed.
      | \bname{_MARK}\s*:\s*{_MARK}{_NAME}{_MARK},?\s*
        {_MARK}value(?P<quote>\\{{0,9}}["'])?\s*:\s*
      # In sentences, and in files whose settings have no sign between name and value.
      | \b(?:password|passphrase)[ ](?=["'])
      | \b(?:password|passphrase|token|secret|key)[ ](?:is|was)[ ](?=\S*\d)
      | \b(?:bindpw|requirepass|login[ ]+\S{{1,99}}[ ]+password)[ ]+
    )
    (?(mark)|(?(quote)|(?!{_CLOSED})))
    (?P<value>
      [|>][-+\d]{{0,2}}[^\S\n]*\n (?P<indent>[ ]+)[^\n]*  # a block of YAML
        (?:\n(?:(?P=indent)[^\n]*|[ ]*(?=\n)))*
      | (?:\n[ ]*-[ ]+(?!{_KEY})[^\n]+)+  # a list of YAML
      | {_QUOTED}
      | \[\s*(?:\\*["'][^"'\\\[\]]*\\*["'][\s,]*)+\]
      | (?:(?:bearer|basic|digest|negotiate|token)\s+)?
        \\*["']?(?:[^\s,;{{}}\[\]()"'\\]|[,;](?![\s,;{{}}\[\]()"'\\]|$))+
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_ARGUMENT = re.compile(
    rf"""(?P<before>
      # User and password of curl; but not numbers of a user and a group.
      (?<![^\s"'])(?:--(?:proxy-)?user(?:=|{_NEXT})|-u{_NEXT}?)
        (?=\\*["']?(?!\d+:\d+(?![^\s"'\\]))[^\s:"'\\]{{1,200}}:)
      | (?<![^\s"'])-U{_NEXT}(?=\\*["']?[^\s:"'\\%]{{1,200}}%)  # an option of Samba
      | \bsshpass{_NEXT}\\*["']?-p{_NEXT}?
      | \b(?:mysql|mysqladmin|mysqldump|mariadb)\b[^\n|;&]{{0,200}}?(?<=[\s"'])-p(?=[^\s"'\\-])
      | \blogin\b[^\n|;&]{{0,200}}?(?<=[\s"'])-p{_NEXT}
      | \bredis-cli\b[^\n|;&]{{0,200}}?(?<=[\s"'])-a{_NEXT}
      | \bldap[a-z]+\b[^\n|;&]{{0,200}}?(?<=[\s"'])-w{_NEXT}
    )
    (?!{_CLOSED}) (?P<value>{_QUOTED} | [^\s"'\\]+)""",
    re.VERBOSE,
)
_QUOTE = re.compile(r"""\\*["']""")
_UNNAMED = (
    # A key or certificate in PEM; if it is cut off, the Base64 that follows the header.
    re.compile(
        r"-----BEGIN [^-\n]+-----"
        r"(?:(?:[^\"-]|-(?!----))*-----END [^-\n]+-----|(?:[\w+/=\s]|\\[nr])*)"
    ),
    re.compile(r"LS0tLS1CRUdJTi[\w+/=]*"),  # PEM in Base64, as in a Secret
    # User and password in a URL. The password may have "@" or "/".
    re.compile(
        r"(?<=://)(?:[^/\s@:\"'?#]{0,100}:[^/\s\"'?#]{1,300}"
        r"|[^/\s@:\"'?#]{0,100}:[^\s@\"']{1,300})(?=@(?!sha\d{3}:))"
    ),
    re.compile(r"(?<=://)[^/\s@:\"'?#]{1,300}(?=@(?!sha\d{3}:))"),  # a token in a URL
    # Tokens of GitHub, GitLab, Slack, NVIDIA, Docker, DigitalOcean, Grafana, Google, Stripe and
    # PyPI, by their unique prefixes.
    re.compile(
        r"\b(?:gh[a-z]_|github_pat_|gl(?:pat|rt|dt|ft|ptt|cbt)-|xox[a-z]-|xapp-|nvapi-|dckr_pat_"
        r"|do[opr]_v1_|glsa_|glc_|ya29\.|AIza|GOCSPX-|[rs]k_(?:live|test)_|pypi-AgE)[\w-]{10,}"
    ),
    # Hugging Face, npm, OpenAI, Anthropic, Vault, Databricks, age, AWS and SendGrid. Ordinary
    # words begin with these prefixes too, so the length counts.
    re.compile(r"\b(?:hf_|npm_)[A-Za-z\d]{20,}"),
    re.compile(r"\bsk-(?=[A-Za-z_-]{0,60}\d)[\w-]{20,}"),
    re.compile(r"\b(?:hv[bsr]\.[\w-]{20,}|dapi[\da-f]{32}|AGE-SECRET-KEY-1[A-Z\d]{20,})"),
    re.compile(r"\b(?:A(?:KI|SI|BI|CC)A[A-Z2-7]{16}\b|SG\.[\w-]{16,99}\.[\w-]{16,99})"),
    re.compile(r"(?<=//hooks\.slack\.com/services/)[\w/]+"),  # a secret URL: allows posting
    # A JSON Web Token, with the characters joined to it.
    re.compile(r"(?<![\w-])(?=[\w-]+\.[\w-]+\.)[\w-]*?\beyJ[\w-]+\.[\w-]+\.[\w-]*"),
    re.compile(r"(?<=\bbearer )[\w.~+/=-]+", re.IGNORECASE),
)
_MIN_LETTERS = 6  # shorter secrets are not searched for: they would match ordinary text


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace known secrets and text that looks like a credential; JSON stays valid."""
    # Longest first: one secret may be part of another.
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _MIN_LETTERS:
            in_base64 = base64.b64encode(secret.encode(errors="surrogateescape")).decode()
            in_url = urllib.parse.quote(secret, safe="", errors="surrogateescape")
            for form in (json.dumps(secret)[1:-1], secret, in_base64.rstrip("="), in_url):
                text = text.replace(form, REMOVED)
    for named in (_LINE, _NAMED, _ARGUMENT):
        text = named.sub(_replacement, text)
    for pattern in _UNNAMED:
        text = pattern.sub(REMOVED, text)
    return text


def _replacement(match: re.Match[str]) -> str:
    # After a quoted key, a bare number or word is JSON: its replacement needs quotes.
    opening = _QUOTE.match(match["value"])
    groups = match.groupdict("")
    quote = opening[0] if opening else groups.get("mark") or groups.get("quote") or ""
    space = " " if match["value"].startswith("\n") else ""
    return f"{match['before']}{space}{quote}{REMOVED}{quote}"


def values(text: str) -> tuple[str, ...]:
    """Return the named secrets of a text, such as the token in a kubeconfig."""
    matches = (match for pattern in (_LINE, _NAMED) for match in pattern.finditer(text))
    return tuple(dict.fromkeys(match["value"].strip("\"'") for match in matches))


def is_secret(name: str) -> bool:
    """Return whether a variable's name suggests a secret."""
    return name not in _FOLDERS and re.fullmatch(_NAME, name, re.IGNORECASE) is not None
