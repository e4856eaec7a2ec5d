"""Allow line breaks in long names: a hook of MkDocs, called with each page that it writes."""

import html
import re

_NAME = re.compile(r"(?<!</span><code>)(?<=<code>)[^<]*(?=</code>)")
"""Not a block of code, before which Pygments has an element, and which scrolls."""
_WORD = re.compile(r"[^\s,]+")
_SIGN = re.compile(r"(?<=\w[_/=:,])(?=\w)|(?<=\w\.)(?=\w{5})|(?<=[a-z])(?=[A-Z])")
_SHORT = 18
"""Characters of a name, or a part of it, that is not broken; browsers do it after any hyphen."""


def on_post_page(output: str, **_: object) -> str:
    """Return a page whose names may break over two lines.

    It adds no character that a search or a copy would have.
    """
    return _NAME.sub(lambda name: _WORD.sub(_breakable, name[0]), output)


def _breakable(word: re.Match[str]) -> str:
    parts = [word[0]] if len(html.unescape(word[0])) <= _SHORT else _SIGN.split(word[0])
    return "<wbr>".join(map(_whole, parts))


def _whole(part: str) -> str:
    if len(html.unescape(part)) <= _SHORT and "-" in part:
        return f'<span class="whole">{part}</span>'
    return re.sub(r"^-+\w+", r'<span class="whole">\g<0></span>', part)
