"""List words that this project replaces: ``python -m docs.language [PATH...]``.

Identifiers are split at underscores and capitals: ``told_as`` has ``told``. The names of files are
searched, too. A line of output is ``file:line: word (say: ...)``. Also: locals that hide a name of
their module, long names of tests, fields and errors that are not documented as CONTRIBUTING.md
says, and stale references such as ``module.name`` or an error that no longer exists.
"""

import ast
import builtins
import collections
import functools
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]

SCANNED = (
    *("mig_manager", "tests", "testkit", "bench", "docs", "deploy", "charts", "systemd"),
    *("profiles", "release", ".ci", ".github", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("Dockerfile", "justfile", "mkdocs.yml", "pyproject.toml"),
)
_DATA = {".json", ".svg", ".txt", ".pyc", ".css", ".sum", ".mod", ".so"}
_OWN_NAME = "docs/language.py"

WORDS = {
    # Say: instead of any of these. Spaces stand for any white space, "-" or "_".
    "requested layout, desired layout": (
        "wish|wishes|wished|wishing|wanted|what is asked|asked of"
    ),
    "roll back, rollback": (
        "way back|wayback|(?:bring|brings|brought|bringing) back"
        "|(?:take|takes|taken|taking)(?: it| them)? back"
    ),
    "active, applied": "in force",
    "verified, schedulable": "proven|offered",
    "in use by, uses, keeps": ("held|holder|holders|has a user|has no user|sits on|sit on"),
    "reported, published": "told|tell|tells|telling",
    "release, restore": "(?:give|gives|given|giving|gave) back",
    "drain, evict, cordon, uncordon": (
        "clear the way|have pods leave|let it be|let them be|let be|close the node|must leave"
    ),
    "affected pods": "victim|victims|in the way",
    "GPU clients": "staff",
    "operands of the operator, other pods": "stranger|strangers",
    "retry, backoff": "patience|pace|paces|tries? again later",
    "drift, drift check": "lookout|sight|look(?! (?:at|for|up|like|into|in|them up|it up)\\b)",
    "lock, round": "turn|turns",
    "node agent, command line": "standalone",
    "dependencies, ports, adapters": "world|worlds",
    "journal, pending": "due|what is left",
    "resume, undo": (
        "(?:carry|carries|carried) on|(?:make|makes|made|making) good|settle|settles|settled"
    ),
    "superseded": "(?:ended|ends|end) early",
    "nvidia-mig-parted": "peer|peers",
    "placements, instances": "places",
    "MIG mode change": "mode switch|mode switches|switch(?:es)? of (?:the )?(?:mig )?mode",
    "worker process, request, answer": "talker|talkers|board|boards|exchange|exchanges",
    "kill, end": "deaths?",
    "last call": "epitaph|epitaphs|postmortem|post mortem",
    "a named subject": "nobody|somebody|whoever|(?:is|are) people's",
    "partition, repartition": "recut|recuts|recutting",
    "plain words": "lest|anew|thereby|of which|such that|mind|minds",
}

NAMES = {"said", "given", "told", "held", "mind", "staff"}
"""Names that hide what a thing is: no variable, parameter, function or class has one of these."""
STRICT_NAMES = {
    *(*NAMES, "asked", "chosen", "ended", "found", "here", "known", "left", "ours", "owed"),
    *("own", "seen", "taken"),
}
"""The same outside of ``_JSON_KEYS``, where also no function is a single participle."""
_JSON_KEYS = "mig_manager/core/answers/check_answers.py"
_HIDES = "another name: this one is a function, class or import of the module"
_FIELD_RULE = "a phrase that fits: comment, lower case, no full stop; otherwise: docstring"
_ERROR_RULE = "a section 'Raises:', or '; HostError if it fails' at the end of the first line"
_MAX_COLUMNS = 99
_MAX_TEST_NAME_CHARACTERS = 70
_COMMENT = re.compile(r"  # (?!noqa|type:)(?P<text>.+)")
_SENTENCE = re.compile(r"(?!None|True|False|Unix|Kubernetes)(?:A|[A-Z][a-z]+)\b|.*\.$")
_ERROR = re.compile(
    r"\b[Rr]aises\s+\w+Error|(?:^|\.\s+)`*\w+Error\b|;\s+`*\w+Error`*(?: \(?[A-Z_]+\)?)?:"
)
_REFERENCE = re.compile(r"``(?:\w+\.)*([a-z_]+)\.(\w+)")
_FOREIGN = frozenset(
    {"h", "go", "json", "unit", "yaml", "allocatable", "conditions", "io"}
    | {"LazyLoader", "ParseBool"}
)
"""What ends names with a dot that are of no module of ours: of files, fields, other libraries."""
_RAISED = re.compile(
    r";\s+`*([A-Z]\w*[a-z]\w*)`*(?:\s+\(?[A-Z_]+\)?)?\s+(?:if|when|where|unless)\b"
)
_RAISES = re.compile(r"^ {4}(\w+):", re.MULTILINE)
_LIMIT = re.compile(r"\b_?(?:MOST|LONGEST|LARGEST|FEWEST|LEAST)_(?!FRAGMENTED|COMMON)[A-Z_]+\b")


EXEMPT = (
    # Ordinary English.
    r"\bexchanges? messages\b|\blook (?:idle|the same|alike|the name up)\b|\bin \w+ places\b",
    r"\bdue to\b|\bin turn\b|\bdecimal places\b|\b(?:tells?|told)(?: \w+){0,4} apart\b",
    r"\bturn(?:s|ed)?(?: it| them)? (?:on|off)\b|\bturn(?:s|ed)?(?: \S+){0,9} into\b",
    # A JSON key, and a check of doctor; a field of a Lease.
    r"\"holders?\"|'holders?'|\bholder identity\b",
    # A licence.
    r"\bcopyright holders\b",
    # A lock is held.
    r"\bheld the lock\b|\block(?:s)?(?: is| are)?[ ._]held\b|\bheld[ _]locks?\b",
    # A time; names of log events.
    r"\b(?:is|was) due\b|\b(?:reset|rollback) due\b",
    # Names of the system and of systemd, of iproute2 and of Go; a term of file permissions.
    r"\bveth peer\b|\blook path\b|\bwanted by\b",
    r"\bso peer ?cred\w*|\bpeer (?:certificate|credentials?)\b|\bworld[- ]readable\b",
)
"""Uses of the words that are right: patterns of the words with what surrounds them."""

EXEMPT_WITHIN = {
    # Kubernetes: a Lease has a holder.
    r".*(?:slots|leases?|leader|lock_?file)": r"\bholders?\b|\bheld\b",
    # Hardware.
    r"mig_manager/(?:sandbox|catalogue|core|adapters/nvml/worker)|tests/|docs/|testkit/": (
        r"\bboards?\b"
    ),
    # HTTP's term for request and response.
    r"(?:mig_manager|tests)/sandbox/": r"\bexchanges?\b",
    # Options of etcd.
    r"tests/rigs/cluster/envtest": r"\bpeer urls\b",
}
"""The same by the pattern of the path below the repository."""


class Finding(NamedTuple):
    """One use of a word that has a better term."""

    path: str
    line: int
    word: str
    say: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word} (say: {self.say})"


def files(paths: Iterable[pathlib.Path]) -> Iterator[pathlib.Path]:
    """Return the text files below some paths; generated data and pictures are left out."""
    for path in paths:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        for each in below:
            if each.is_file() and each.suffix not in _DATA and "__pycache__" not in each.parts:
                yield each


def findings(path: pathlib.Path) -> list[Finding]:
    """Return the uses of such words in a file, in order."""
    name = path.resolve().relative_to(ROOT).as_posix()
    if name == _OWN_NAME:
        return []
    text = path.read_text(encoding="utf-8")
    every = [
        Finding(name, _line(match), " ".join(match[0].split()), _say(match))
        for match in _any_word().finditer(_plain_words(text, name))
    ]
    every += [
        Finding(name, 1, f"file name with {match[0]}", _say(match))
        for match in _any_word().finditer(_plain_words(path.name, name))
    ]
    if path.suffix == ".py":
        every += _findings_in_code(name, text)
    return sorted(every)


def _plain_words(text: str, name: str) -> str:
    """Return the words of a text, in the same lines; uses that are right in a file are dots."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    plain = re.sub(r"[_\-#*`]", " ", words).lower()
    if _any_word().search(plain):
        within = (pattern for where, pattern in EXEMPT_WITHIN.items() if re.match(where, name))
        for exempt in (*EXEMPT, *within):
            plain = _spaced(exempt).sub(lambda match: re.sub(r"\S", ".", match[0]), plain)
    return plain


def _findings_in_code(name: str, text: str) -> Iterator[Finding]:
    """Yield what the syntax of a file and its comments show."""
    nodes = [*ast.walk(ast.parse(text))]
    for line, word in _names(nodes, is_strict=name != _JSON_KEYS):
        yield Finding(name, line, f"name {word}", "what it is")
    for line in _misdocumented_fields(nodes, text.splitlines()):
        yield Finding(name, line, "text of a field", _FIELD_RULE)
    for match in _LIMIT.finditer(text):
        yield Finding(name, _line(match), match[0], "MAX_, MIN_")
    for line, word in {*_hiding_names(nodes)}:
        yield Finding(name, line, f"local {word}", _HIDES)
    for line, word in _long_test_names(nodes):
        say = f"at most {_MAX_TEST_NAME_CHARACTERS} characters"
        yield Finding(name, line, f"name of {len(word)} characters: {word}", say)
    if not name.startswith("mig_manager/"):
        return
    for line in _misdocumented_errors(nodes):
        yield Finding(name, line, "text of an error", _ERROR_RULE)
    for line, word in (*_stale_references(text), *_stale_errors(nodes, (ROOT / name).parent)):
        yield Finding(name, line, word, "a name that exists")


def _line(match: re.Match[str]) -> int:
    """Return the line on which a match begins."""
    return match.string.count("\n", 0, match.start()) + 1


@functools.cache
def _spaced(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(" ", r"\s+"))


@functools.cache
def _any_word() -> re.Pattern[str]:
    return _spaced(rf"(?<![a-z])(?:{'|'.join(WORDS.values())})(?![a-z])")


def _say(match: re.Match[str]) -> str:
    """Return the terms that replace a word."""
    return next(
        say
        for say, words in WORDS.items()
        if _spaced(rf"(?:{words})").match(match.string, match.start())
    )


def _names(nodes: Sequence[ast.AST], *, is_strict: bool) -> Iterator[tuple[int, str]]:
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()) if is_strict:
                pass
            case _:
                continue
        word = name.strip("_").lower()
        # A decorated function, such as a property, is a value or a context.
        is_verb = isinstance(node, ast.FunctionDef) and not any(
            "fixture" not in ast.unparse(each) for each in node.decorator_list
        )
        # Proceed is a verb, and need is one.
        is_participle = is_strict and is_verb and re.fullmatch(r"[a-z]+(?<!e)ed", word)
        if word in (STRICT_NAMES if is_strict else NAMES) or is_participle:
            yield node.lineno, name


def _long_test_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) if name.startswith("test_"):
                if len(name) > _MAX_TEST_NAME_CHARACTERS:
                    yield node.lineno, name
            case _:
                pass


def _hiding_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the locals and parameters that hide a function, class or import of their module."""
    body = [each for node in nodes if isinstance(node, ast.Module) for each in node.body]
    imports = (each for each in body if isinstance(each, ast.Import | ast.ImportFrom))
    aliases = (alias for each in imports for alias in each.names)
    # A test takes the value of a fixture by a parameter of its name.
    defined = (
        each
        for each in body
        if isinstance(each, ast.FunctionDef | ast.ClassDef) and not _is_fixture(each)
    )
    module_names = {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    module_names |= {each.name for each in defined}
    for function in nodes:
        if not isinstance(function, ast.FunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    if name in module_names:
                        yield node.lineno, name
                case _:
                    pass


def _is_fixture(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any("fixture" in ast.unparse(each) for each in node.decorator_list)


def _misdocumented_fields(nodes: Sequence[ast.AST], lines: Sequence[str]) -> Iterator[int]:
    """Yield the lines of fields and constants whose text is in the wrong place or form."""
    bodies = (each.body for each in nodes if isinstance(each, ast.Module | ast.ClassDef))
    for body in bodies:
        for field, text in itertools.zip_longest(body, body[1:]):
            if not isinstance(field, ast.Assign | ast.AnnAssign):
                continue
            line = lines[(field.end_lineno or field.lineno) - 1]
            comment = _COMMENT.search(line)
            match text:
                case ast.Expr(value=ast.Constant(value=str(words)), end_lineno=int(end)):
                    is_phrase = not re.search(r"[.!?] [A-Z`]", words)
                    fits = len(f"{line}  # {words.rstrip('.')}") <= _MAX_COLUMNS
                    if end == field.lineno + 1 and fits and is_phrase and "#" not in line:
                        yield end
                case _ if comment and _SENTENCE.match(comment["text"]):
                    yield field.lineno
                case _:
                    pass


def _misdocumented_errors(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines of functions whose docstrings name an error in another form."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            text, *_ = (ast.get_docstring(node) or "").partition("\nRaises:\n")
            if _ERROR.search(text):
                yield node.lineno


@functools.cache
def _names_of_modules() -> Mapping[str, set[str]]:
    """Return the names that modules and folders of the product have; the keys have no folder."""
    names = collections.defaultdict[str, set[str]](set)
    for path in (ROOT / "mig_manager").rglob("*.py"):
        module = path.parent.name if path.stem == "__init__" else path.stem
        names[path.parent.name].add(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names[module].add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names[module].add(name)
                case ast.ImportFrom(names=imported) if path.stem == "__init__":
                    names[module].update(each.name for each in imported)
                case _:
                    pass
    return names


def _stale_references(text: str) -> Iterator[tuple[int, str]]:
    """Yield references to a name that its module does not have, or to a class of no module."""
    names = _names_of_modules()
    for match in _REFERENCE.finditer(text):
        module, name = match.groups()
        is_ours = module in names or name[0].isupper()
        if is_ours and name not in names.get(module, ()) and name not in _FOREIGN:
            yield _line(match), match[0].lstrip("`")


@functools.cache
def _classes(path: pathlib.Path) -> set[str]:
    """Return the names of the classes of a module, or of the modules of a folder."""
    modules = path.glob("*.py") if path.is_dir() else [path]
    trees = [ast.parse(each.read_text(encoding="utf-8")) for each in modules]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _stale_errors(nodes: Sequence[ast.AST], folder: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield the errors of docstrings that a module neither uses nor shares with its folder."""
    known = {*dir(builtins)} | _classes(ROOT / "mig_manager" / "errors.py") | _classes(folder)
    known |= {each.attr for each in nodes if isinstance(each, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            text, _, raises = (ast.get_docstring(node) or "").partition("\nRaises:\n")
            for name in (*_RAISED.findall(text), *_RAISES.findall(raises)):
                if name not in known:
                    yield node.lineno, name


def main(arguments: list[str]) -> int:
    """Print the findings below some paths; the exit status is 1 if there are any."""
    scanned = [ROOT / name for name in SCANNED if (ROOT / name).exists()]
    paths = files([pathlib.Path(each) for each in arguments] or scanned)
    every = [each for path in paths for each in findings(path)]
    for finding in every:
        sys.stdout.write(f"{finding}\n")
    sys.stdout.write(f"{len(every)} in all\n")
    return 1 if every else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
