"""The hooks file: what is read, and where it says what is wrong."""

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core.files import hook_files, yaml_text, yaml_tree
from mig_manager.core.files.hook_files import Point

TWO_BY_TWO = """
version: v1
hooks:
  pre-apply-mode:
  - command: /bin/sh
    args: [-c, stop dcgm]
    envs: {A: x, B: y}
    workdir: /etc/nvidia-mig-manager
  - {command: stop-kubelet}
  apply-exit:
  - {command: start-kubelet, args: [], envs: {}, workdir: ""}
  - {command: /bin/sh, args: [-c, start dcgm]}
"""


def parse(text: str) -> hook_files.Table:
    return hook_files.parse(text, source="h.yaml")


def hooks(text: str) -> dict[str, list[tuple[object, ...]]]:
    return {
        point.value: [(hook.command, hook.args, hook.envs, hook.workdir) for hook in each]
        for point, each in parse(text).items()
    }


def test_hooks_of_two_points_are_parsed_in_their_order() -> None:
    read = hooks(TWO_BY_TWO)
    assert read == {
        "pre-apply-mode": [
            ("/bin/sh", ("-c", "stop dcgm"), {"A": "x", "B": "y"}, "/etc/nvidia-mig-manager"),
            ("stop-kubelet", (), {}, ""),
        ],
        "apply-exit": [
            ("start-kubelet", (), {}, ""),
            ("/bin/sh", ("-c", "start dcgm"), {}, ""),
        ],
    }
    assert Point.APPLY_START not in parse(TWO_BY_TWO)
    plain = yaml_tree.plain(yaml_text.parse(TWO_BY_TWO, source="h.yaml"))
    assert hooks(yaml_text.dump(plain)) == read


@pytest.mark.parametrize(
    "text",
    [
        "", "# nothing", "null", "version: v1", "version: v1\nhooks:", "{hooks: {}}",
        "hooks: {apply-start: }", "hooks: {apply-start: [], apply-exit: []}",
    ],
)  # fmt: skip
def test_a_file_without_hooks_is_an_empty_table(text: str) -> None:
    assert parse(text) == {}


def test_scalars_become_the_texts_and_keys_have_the_cases_of_mig_parted() -> None:
    scalars = (
        "hooks: {apply-start: [{command: 7z, args: [1, yes, 1.5, 2.0, 'on', 0x10, ],"
        " envs: {A: 1, B: off, C: , 5: no}}]}"
    )
    envs = {"A": "1", "B": "false", "C": "", "5": "false"}
    args = ("1", "true", "1.5", "2", "on", "16")
    assert hooks(scalars) == {"apply-start": [("7z", args, envs, "")]}
    capital = (
        "{Version: v1, HOOKS: {apply-exit: [{Command: /x, Args: [a], Envs: {a: B}, WorkDir: /}]}}"
    )
    assert hooks(capital) == {"apply-exit": [("/x", ("a",), {"a": "B"}, "/")]}


def test_a_hook_may_have_a_timeout() -> None:
    one, other = parse(
        "hooks: {apply-exit: [{command: /x, timeout-s: 2.5}, {command: /x, timeout-s: }]}"
    )[Point.APPLY_EXIT]

    assert (one.timeout_s, other.timeout_s) == (2.5, None)


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("[]", "1:1", "expected a mapping"),
        ("version: v2", "1:10", "must be the text v1"),
        ("version: 1", "1:10", "must be the text v1"),
        ("version: v1\nhook: {}", "2:1", "unexpected key 'hook'; did you mean 'hooks'"),
        ("hooks: []", "1:8", "must be a mapping of points"),
        ("hooks:\n  pre-aply-mode: []", "2:3", "did you mean 'pre-apply-mode'"),
        ("hooks:\n  Apply-Start: []", "2:3", "did you mean 'apply-start'"),
        ("hooks:\n  apply-exit: {}", "2:15", "must be a list"),
        ("hooks:\n  apply-exit:\n  - /bin/true", "3:5", "expected a mapping"),
        ("hooks:\n  apply-exit:\n  - args: [x]", "3:5", "'command' is missing"),
        ("hooks:\n  apply-exit:\n  - command:", "3:13", "must name a program"),
        ("hooks:\n  apply-exit:\n  - command: [a]", "3:14", "must be a text, not a list"),
        ("hooks:\n  apply-exit:\n  - {command: a, args: x}", "3:24", "args must be a list"),
        ("hooks:\n  apply-exit:\n  - {command: a, args: [{}]}", "3:25", "argument must be"),
        ("hooks:\n  apply-exit:\n  - {command: a, envs: [A]}", "3:24", "envs must be a mapping"),
        ("hooks:\n  apply-exit:\n  - {command: a, envs: {A: []}}", "3:28", "'A' must be a text"),
        ("hooks:\n  apply-exit:\n  - {command: a, envs: {A=B: x}}", "3:25", "name of a variable"),
        ("hooks:\n  apply-exit:\n  - {command: a, envs: {'': x}}", "3:25", "name of a variable"),
        ('hooks:\n  apply-exit:\n  - {command: "a\\0b"}', "3:15", "no program can receive"),
        ('hooks:\n  apply-exit:\n  - {command: a, envs: {"\\0": x}}', "3:25", "name of a"),
        ("hooks:\n  apply-exit:\n  - {command: a, comand: b}", "3:18", "did you mean 'command'"),
        ("hooks:\n  apply-exit:\n  - {command: a, Command: b}", "3:18", "given twice"),
        ("hooks:\n  apply-exit:\n  - {command: a, timeout-s: 0}", "3:29", "number of seconds"),
        ("hooks:\n  apply-exit:\n  - {command: a, timeout-s: yes}", "3:29", "number of seconds"),
        ("hooks:\n  apply-exit:\n  - {command: a, timeout-s: .nan}", "3:29", "number of seconds"),
        ("hooks: [}", "1:9", "not readable as YAML"),
    ],
)
def test_errors_are_refused_with_their_location(text: str, where: str, why: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse(text)

    assert caught.value.message.startswith(f"h.yaml:{where}: ")
    assert why in caught.value.message


_WORDS = st.sampled_from(
    [
        *("version", "v1", "hooks", *(point.value for point in Point)),
        *("command", "args", "envs", "workdir", "timeout-s", "Command", "/bin/sh", "=", "\\0"),
        *(
            ": ", "\n", "\n  ", "\n  - ", "- ", "[", "]", "{", "}", ", ", "'", '"', "&a ", "*a",
            "~",
        ),
        *("1", "-1", "1e999", ".nan", "yes", "0x", "<<", "!!binary ", "|", "\t", "\ud800", "\x00"),
    ]
)  # fmt: skip


@hypothesis.given(st.one_of(st.text(), st.lists(_WORDS, max_size=40).map("".join)))
@hypothesis.example(TWO_BY_TWO)
@hypothesis.example("hooks: &a {apply-start: *a}")
@hypothesis.example("[" * 5000)
def test_any_text_is_a_table_or_a_typed_error(text: str) -> None:
    try:
        table = parse(text)
    except errors.ConfigError:
        return
    for point in Point:
        for hook in table.get(point, ()):
            # Nothing of it can keep a process from being started.
            assert hook.command
            for word in (hook.command, hook.workdir, *hook.args, *hook.envs.values()):
                assert b"\0" not in word.encode()
