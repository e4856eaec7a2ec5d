"""The command line as people, scripts and NVIDIA's units use it, over simulated GPUs."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.cli import command_settings, console, main, parser
from mig_manager.core import yaml_tree
from tests.shell.commandline import Shell, forget

SPEC = ("--simulate", "2xA100-SXM4-40GB")
LAYOUTS = """
version: v1
mig-configs:
  one:
  - devices: all
    mig-enabled: true
    mig-devices: {3g.20gb: 1, 1g.5gb: 4}
  other:
  - devices: all
    mig-enabled: false
"""
ONLY_ONE = LAYOUTS[: LAYOUTS.index("  other")]


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[Shell]:
    yield Shell(tmp_path)
    forget()


@pytest.fixture
def layouts(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "layouts.yaml"
    path.write_text(LAYOUTS)
    return str(path)


def process(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "mig_manager", *argv],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_apply_says_what_nvidias_tool_says(shell: Shell, layouts: str) -> None:
    answer = shell("apply", "-f", layouts, "-c", "one", *SPEC)

    assert answer.status == 0
    assert answer.out == "MIG configuration applied successfully\n"
    assert "0 instances destroyed, 10 created, 0 stay" in answer.err


def test_commands_see_what_earlier_ones_did(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, *SPEC)

    answer = shell("assert", "one", "-f", layouts, *SPEC)

    assert (answer.status, answer.out) == (0, "Selected MIG configuration currently applied\n")


def test_apply_of_an_active_layout_succeeds_and_reports_it(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, *SPEC)

    answer = shell("apply", "one", "-f", layouts, *SPEC)

    assert (answer.status, answer.out) == (0, "MIG configuration applied successfully\n")
    assert "layout 'one' is already active" in answer.err


def test_assert_fails_with_the_difference_when_not_applied(shell: Shell, layouts: str) -> None:
    answer = shell("assert", "one", "-f", layouts, *SPEC)

    assert (answer.status, answer.out) == (1, "")
    assert "layout 'one' is not applied: GPU 0 has the whole GPU, not partitioned" in answer.err


def test_assert_can_look_at_the_mode_alone(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, "--mode-only", *SPEC)

    answer = shell("assert", "one", "-f", layouts, "-m", *SPEC)

    assert answer.status == 0
    assert answer.out == "Selected MIG mode settings from configuration currently applied\n"
    assert shell("assert", "one", "-f", layouts, *SPEC).status == 1


def test_assert_can_check_the_file_alone_without_any_gpu(shell: Shell, layouts: str) -> None:
    answer = shell("assert", "-af", layouts, "-c", "one")

    assert (answer.status, answer.out) == (0, "Selected MIG configuration is valid\n")
    assert answer.err == ""


def test_mig_parteds_variables_are_enough(shell: Shell, layouts: str) -> None:
    answer = shell(
        "apply",
        *SPEC,
        MIG_PARTED_CONFIG_FILE=layouts,
        MIG_PARTED_SELECTED_CONFIG="one",
        MIG_PARTED_MODE_CHANGE_ONLY="false",
        MIG_PARTED_SKIP_RESET="",
    )

    assert answer.status == 0


def test_the_only_layout_of_a_file_need_not_be_named(shell: Shell) -> None:
    answer = shell("apply", "-f", "-", *SPEC, stdin=ONLY_ONE)

    assert answer.status == 0


def test_one_layout_of_several_must_be_named(shell: Shell, layouts: str) -> None:
    answer = shell("apply", "-f", layouts, *SPEC)

    assert answer.status == 2
    assert f"name a layout; {layouts} has one, other" in answer.err


def test_without_a_file_the_one_that_comes_with_the_program_serves(shell: Shell) -> None:
    assert shell("apply", "all-disabled", *SPEC).status == 0


def test_export_writes_a_document_that_assert_accepts(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, *SPEC)

    for extra in ((), ("-o", "json")):
        exported = shell("export", "-l", "now", *extra, *SPEC)
        answer = shell("assert", "now", "-f", "-", *SPEC, stdin=exported.out)
        assert (exported.status, answer.status) == (0, 0)


def test_plan_shows_and_changes_nothing(shell: Shell, layouts: str) -> None:
    answer = shell("plan", "one", "-f", layouts, *SPEC)

    assert answer.status == 0
    assert "MIG off → on, resets the GPU" in answer.out
    assert "Layout one: 0 instances destroyed, 10 created" in answer.out
    assert shell("assert", "one", "-f", layouts, *SPEC).status == 1


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("plan", "all-disabled"),
        ("apply", "all-disabled"),
        ("assert", "all-disabled"),
        ("validate", "all-disabled"),
        ("export",),
    ],
)
def test_every_answer_can_be_had_as_json_and_yaml(shell: Shell, argv: tuple[str, ...]) -> None:
    as_json = shell(*argv, "-o", "json", *SPEC)
    as_yaml = shell(*argv, "-o", "yaml", *SPEC)

    parsed = yaml_tree.plain(yaml_tree.parse(as_yaml.out, source="out"))
    assert json.loads(as_json.out) == parsed
    assert (as_json.status, as_yaml.status) == (0, 0)


def test_a_failed_assert_answers_machines_too(shell: Shell, layouts: str) -> None:
    answer = shell("assert", "one", "-f", layouts, "-o", "json", *SPEC)

    assert answer.status == 1
    assert json.loads(answer.out)["is_applied"] is False


def test_wide_status_lists_ids_and_uuids(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, *SPEC)

    answer = shell("status", "-o", "wide", *SPEC)

    assert "MIG-" in answer.out
    assert answer.out.count("3g.20gb          4:4") + answer.out.count("3g.20gb          0:4") == 2


def test_simulation_is_said_once_and_not_on_standard_output(shell: Shell) -> None:
    answer = shell("status", *SPEC)

    assert answer.err.count("GPUs are simulated") == 1
    assert "simulated" not in answer.out


def test_a_fresh_simulation_forgets(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, *SPEC)

    assert shell("assert", "one", "-f", layouts, "--fresh", *SPEC).status == 1


def test_a_fresh_simulation_leaves_a_journal_that_another_node_may_have(
    shell: Shell, layouts: str, tmp_path: pathlib.Path
) -> None:
    journal, layout = tmp_path / "journal.json", tmp_path / "layout.json"
    for file in (journal, layout):
        file.write_text("precious")

    files = ("--journal-file", str(journal), "--verified-layout-file", str(layout))
    shell("apply", "no-such-layout", "-f", layouts, "--fresh", *SPEC, *files)

    # An unreadable journal is moved aside, and kept.
    kept = [*tmp_path.glob("journal.json*"), layout]
    assert [file.read_text() for file in kept] == ["precious", "precious"]


@pytest.mark.parametrize("command", ["apply", "boot", "restore", "status", "doctor"])
@pytest.mark.parametrize("flag", [("--fresh",), ()])
def test_real_gpus_cannot_start_afresh_and_nothing_is_deleted(
    shell: Shell, tmp_path: pathlib.Path, command: str, flag: tuple[str, ...]
) -> None:
    journal, layout = tmp_path / "journal.json", tmp_path / "layout.json"
    for file in (journal, layout):
        file.write_text("precious")
    environ = {
        "MIG_MANAGER_JOURNAL_FILE": str(journal),
        "MIG_MANAGER_VERIFIED_LAYOUT_FILE": str(layout),
    }

    answer = shell(command, *flag, **environ, **({} if flag else {"MIG_MANAGER_FRESH": "true"}))

    assert answer.status == 2
    assert "--fresh resets simulated GPUs; name them with --simulate" in answer.err
    assert [file.read_text() for file in (journal, layout)] == ["precious", "precious"]


@pytest.mark.parametrize("command", parser.COMMANDS)
def test_an_unset_variable_of_a_script_is_not_taken_for_the_default(
    shell: Shell, command: str
) -> None:
    for option in parser.options_of(command):
        for flag in option.flags if option.metavar else ():
            answer = shell(command, flag, "")

            assert answer.status == 2
            assert flag in answer.err
            assert "the value is empty" in answer.err


@pytest.mark.parametrize(
    "argv",
    [
        ("apply", ""),
        ("apply", "all-disabled", "--skip-reset="),
        ("apply", "all-disabled", "--simulate="),
        ("agent", "-n", "n1", "--with-reboot="),
        ("rollout", "", "-l", "a=b"),
    ],
)
def test_what_is_given_empty_in_another_way_is_refused_as_well(
    shell: Shell, argv: tuple[str, ...]
) -> None:
    answer = shell(*argv)

    assert answer.status == 2
    assert "the value is empty" in answer.err


def test_an_unknown_variable_of_ours_gives_a_warning(shell: Shell) -> None:
    answer = shell("status", *SPEC, MIG_MANAGER_GPU_TIMEOUT="5", MIG_MANAGER_NODE_NAME="n1")

    assert answer.status == 0
    assert answer.err.count("warning") == 1
    assert (
        "warning: MIG_MANAGER_GPU_TIMEOUT is ignored: no option has this variable; "
        "did you mean MIG_MANAGER_GPU_TIMEOUT_S?" in answer.err
    )


def test_the_agent_logs_a_variable_of_ours_that_no_option_has(shell: Shell) -> None:
    answer = shell("agent", "-n", "n1", MIG_MANAGER_DRAIN_TIMEOUT="5")

    logged = json.loads(answer.err.splitlines()[0])
    assert logged["event"] == "variable_unknown"
    assert logged["name"] == "MIG_MANAGER_DRAIN_TIMEOUT"
    assert logged["did_you_mean"] == "MIG_MANAGER_DRAIN_TIMEOUT_S"


def test_variables_that_kubernetes_makes_for_a_service_are_no_mistakes(shell: Shell) -> None:
    # Of Services called mig-manager and mig-manager-metrics, in the pod's namespace.
    answer = shell(
        "status",
        *SPEC,
        MIG_MANAGER_SERVICE_HOST="10.0.0.1",
        MIG_MANAGER_SERVICE_PORT="9400",
        MIG_MANAGER_SERVICE_PORT_METRICS="9400",
        MIG_MANAGER_PORT="tcp://10.0.0.1:9400",
        MIG_MANAGER_METRICS_PORT_9400_TCP="tcp://10.0.0.1:9400",
        MIG_MANAGER_METRICS_PORT_9400_TCP_ADDR="10.0.0.1",
    )

    assert "warning" not in answer.err


@pytest.mark.parametrize("variable", ["CONFIG_FILE", "DEFAULT_CONFIG_FILE"])
@pytest.mark.parametrize("command", ["plan", "apply", "assert", "validate"])
def test_in_the_agents_pod_the_commands_read_the_agents_document(
    shell: Shell, layouts: str, command: str, variable: str
) -> None:
    answer = shell(command, "no-such", *SPEC, **{variable: layouts})

    assert f"{layouts} has no layout 'no-such'" in answer.err


def test_at_a_shell_our_own_variables_go_before_the_agents(
    shell: Shell, layouts: str, tmp_path: pathlib.Path
) -> None:
    agents = {"CONFIG_FILE": "/nonexistent"}

    assert shell("apply", "one", *SPEC, "-f", layouts, **agents).status == 0
    assert shell("apply", "one", *SPEC, MIG_PARTED_CONFIG_FILE=layouts, **agents).status == 0
    assert shell("apply", "one", *SPEC, MIG_MANAGER_CONFIG_FILE=layouts, **agents).status == 0
    # What a boot restores must not depend on a variable that other programs use as well.
    journal = (
        "--journal-file",
        str(tmp_path / "j"),
        "--verified-layout-file",
        str(tmp_path / "p"),
    )
    assert shell("boot", *SPEC, *journal, **agents).status == 0


def test_mixed_nodes_can_be_simulated(shell: Shell) -> None:
    answer = shell("status", "--simulate", "1xA100-SXM4-80GB+1xA30")

    assert "NVIDIA A100-SXM4-80GB" in answer.out
    assert "NVIDIA A30" in answer.out


def test_a_state_file_holds_one_node(shell: Shell, tmp_path: pathlib.Path) -> None:
    state = str(tmp_path / "state.json")
    shell("status", "--simulate-state", state, *SPEC)

    assert shell("status", "--simulate-state", state).status == 0
    assert shell("status", "--simulate-state", state, "--simulate", "1xA30").status == 2


def test_a_simulation_that_is_not_there_is_not_made_up(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    answer = shell("status", "--simulate-state", str(tmp_path / "none.json"))

    assert answer.status == 2
    assert "create it with --simulate" in answer.err


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"options": 3}'])
@pytest.mark.parametrize(
    "options", [(), ("--simulate", "1xA30"), ("--simulate", "1xA30", "--fresh")]
)
def test_a_state_file_of_something_else_is_refused_and_kept(
    shell: Shell, tmp_path: pathlib.Path, content: bytes, options: tuple[str, ...]
) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)

    answer = shell("status", "--simulate-state", str(path), *options)

    assert answer.status == 2
    assert "has no simulated GPUs" in answer.err
    assert path.read_bytes() == content


def test_plan_and_validate_name_the_mig_strategies_that_do_not_serve_a_layout(
    shell: Shell, layouts: str
) -> None:
    plan = shell("plan", "one", "-f", layouts, *SPEC)
    data = json.loads(shell("plan", "one", "-f", layouts, "-o", "json", *SPEC).out)
    validated = shell("validate", "-f", layouts, "one", "--gpu", "A100-SXM4-40GB")

    sentence = "Not for a device plugin with MIG strategy single: MIG devices differ: 1g.5gb"
    assert sentence in plan.out
    assert data["unserved_mig_strategies"].keys() == {"single"}
    assert "Not for MIG strategy single: one" in validated.out


def test_validate_needs_no_gpu(shell: Shell, layouts: str) -> None:
    good = shell("validate", "-f", layouts, "one", "--gpu", "A100-SXM4-40GB")
    bad = shell("validate", "-f", layouts, "one", "--gpu", "*A100*40*", "--gpu", "NVIDIA A30")

    assert (good.status, bad.status) == (0, 1)
    assert "one: NVIDIA A30 has no profile 3g.20gb" in bad.out


def test_a_layout_for_other_gpus_is_no_misfit(shell: Shell) -> None:
    text = LAYOUTS.replace("- devices: all", '- device-filter: "0x233010DE"\n    devices: all')

    answer = shell("validate", "-f", "-", "--gpu", "A30", stdin=text)

    assert answer.status == 0


def test_no_remedy_of_a_command_speaks_of_an_agent_that_tries_again() -> None:
    remedies = [reason.remedy_at_shell for reason in errors.Reason]

    assert not [each for each in remedies if "the agent tries" in each or "agent re-reads" in each]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("frobnicate",), 3, "there is no command 'frobnicate'"),
        (("aply",), 3, "did you mean 'apply'?"),
        (("apply", "--frob"), 2, "--frob"),
        (("apply", "a", "b"), 2, "unrecognized arguments: b"),
        (("apply", "--config-file"), 2, "expected one argument"),
        (("apply", "--select", "x"), 2, "unrecognized arguments"),
        (("apply", "x", "-f", "/nonexistent"), 2, "cannot read /nonexistent"),
        (("apply", "x", "-f", "/"), 2, "cannot read /"),
        (("apply", "no-such", "--simulate", "1xA30"), 2, "no layout 'no-such'"),
        (("apply", "all-disabled", "-k", "/hooks.yaml"), 2, "cannot read /hooks.yaml"),
        (("apply", "all-disabled", "--hook-timeout-s", "0"), 2, "--hook-timeout-s: '0' is not"),
        (("checkpoint",), 2, "name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE"),
        (("restore",), 2, "name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE"),
        (("restore", "-f", "/no/checkpoint"), 2, "cannot read /no/checkpoint"),
        (("status", "--simulate", "banana"), 2, "banana"),
        (("status", "--simulate", "1xA30", "--library-path", "/x.so"), 2, "one or the other"),
        (("status", "--library-path", "/nonexistent.so"), 1, "/nonexistent.so"),
        (("status", "-o", "xml"), 2, "one of text, wide, json, yaml"),
        (("status", "--color", "pink"), 2, "auto, always, never"),
        (("validate", "--gpu", "banana"), 2, "unknown GPU 'banana'"),
        (("demo", "--scenario", "x"), 2, "there are first-layout, "),
        (("agent",), 2, "--node-name"),
        (("agent", "-n", "n", "--drain-timeout-s", "soon"), 2, "--drain-timeout-s: 'soon'"),
    ],
)
def test_bad_input_gets_a_message_a_remedy_and_a_status(
    shell: Shell, argv: tuple[str, ...], status: int, message: str
) -> None:
    answer = shell(*argv)

    assert (answer.status, answer.out) == (status, "")
    lines = answer.err.splitlines()
    assert message in lines[-2]
    assert lines[-2].startswith("mig-manager: ")
    assert lines[-1].startswith("  remedy: ")


def test_bad_documents_are_refused_with_their_place(shell: Shell) -> None:
    text = LAYOUTS.replace("3g.20gb: 1", "3g.20gb: many")

    answer = shell("apply", "one", "-f", "-", *SPEC, stdin=text)

    assert answer.status == 2
    assert "<stdin>:7:" in answer.err


def test_hooks_that_come_from_the_environment_are_read_and_can_be_switched_off(
    shell: Shell,
) -> None:
    argv = ("apply", "all-disabled", *SPEC)

    assert shell(*argv, MIG_PARTED_HOOKS_FILE="/hooks.yaml").status == 2
    assert shell(*argv, MIG_PARTED_HOOKS_FILE="").status == 0


def test_names_from_files_cannot_drive_the_terminal(shell: Shell) -> None:
    answer = shell("apply", "a\x1b[31mb", "-f", "-", *SPEC, stdin=ONLY_ONE)

    assert answer.status == 2
    assert "\x1b" not in answer.err


@pytest.mark.parametrize("argv", [("--debug", "status"), ("status", "-d"), ("-d", "status")])
def test_debug_goes_before_or_after_the_command(shell: Shell, argv: tuple[str, ...]) -> None:
    assert command_settings.command_settings(parser.parse(argv), {}).is_debug
    assert shell(*argv, *SPEC).status == 0


def test_help_is_there_for_every_command(shell: Shell) -> None:
    assert "apply" in shell().out
    assert shell().status == 0
    for command in parser.COMMANDS:
        answer = shell(command, "--help")
        assert answer.status == 0
        assert answer.out.startswith(f"usage: mig-manager {command}")


def test_nvidias_agent_options_are_all_understood() -> None:
    argv = ["agent", "-n", "n1", "-f", "/c", "-s", "x", "-m", "/host", "-i", "/n", "-o", "/o"]
    argv += ["-k", "kubelet.service", "-g", "/g", "-r", "-d", "-p", "ns", "-t", "/t", "-a", "/a"]
    argv += ["--cdi-enabled", "-b", "/b", "-j", "/j", "--nvidia-cdi-hook-path", "/h"]

    chosen = settings.agent_settings(parser.parse(argv), {})

    assert chosen.node_name == "n1"
    assert len(chosen.not_needed) == 5
    assert chosen.gpus.driver_roots == ("/a", "/t")
    assert chosen.host.with_reboot
    assert chosen.host.shuts_host_clients
    assert chosen.host.cdi_enabled
    assert chosen.host.gpu_clients_file == pathlib.Path("/g")


def test_the_demonstration_takes_its_node_and_its_story_from_the_command_line() -> None:
    options = parser.parse(["demo", "--simulate", "2xA30", "--scenario", "budget", "--keep"])

    chosen = command_settings.demo_settings(options, {})

    assert (chosen.spec, chosen.scenario) == ("2xA30", "budget")
    assert (chosen.is_kept, chosen.is_real_time) == (True, False)


def test_a_bug_is_confessed_in_two_lines(shell: Shell) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise LookupError("surprise")

    err = io.StringIO()
    terminal = console.Console(
        stdin=io.StringIO(), stdout=Broken(), stderr=err, environ=shell.environ
    )

    assert main.main(["version"], terminal) == 1
    assert err.getvalue().splitlines()[0] == "mig-manager: internal error: LookupError: surprise"
    assert "please report it" in err.getvalue()
    assert "Traceback" not in err.getvalue()

    for flag in ("--debug", "-d"):
        err.truncate(0)
        assert main.main([flag, "version"], terminal) == 1
        assert "Traceback" in err.getvalue()


def test_an_answer_that_cannot_be_written_is_no_bug() -> None:
    with pathlib.Path("/dev/full").open("w") as full:
        child = subprocess.run(  # our own program
            [sys.executable, "-m", "mig_manager", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert child.returncode == 1
    assert child.stderr == ("mig-manager: cannot write the answer: No space left on device\n")


@pytest.mark.parametrize("stream", ["0<", "1>", "2>"])
def test_a_closed_stream_is_as_good_as_an_empty_one(tmp_path: pathlib.Path, stream: str) -> None:
    command = [sys.executable, "-m", "mig_manager", "apply", "-f", "-", "all", *SPEC]
    child = subprocess.run(  # noqa: S603 - our own program
        ["/bin/sh", "-c", f'exec "$@" {stream}&-', "sh", *command],
        input="{version: v1, mig-configs: {all: [{devices: all, mig-enabled: false}]}}",
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Without its input there is no document, hence no layout.
    assert child.returncode == (2 if stream == "0<" else 0)
    assert "internal error" not in child.stderr


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Hear SIGINT, which a job in the background starts out ignoring."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_a_signal_waits_until_a_change_is_complete() -> None:
    notes: list[str] = []
    done: list[bool] = []

    def change() -> None:
        with console.signals_deferred(notes.append):
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        change()
    assert done
    assert len(notes) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    notes: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with console.signals_deferred(notes.append):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not notes


@pytest.mark.usefixtures("_interruptible")
def test_a_second_signal_does_not_wait() -> None:
    done: list[bool] = []

    def change() -> None:
        with console.signals_deferred(lambda _: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        change()
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_ends_with_the_status_of_one(shell: Shell) -> None:
    class Interrupted(io.StringIO):
        def write(self, _text: str) -> int:
            raise KeyboardInterrupt

    terminal = console.Console(
        stdin=io.StringIO(), stdout=Interrupted(), stderr=io.StringIO(), environ=shell.environ
    )

    assert main.main(["version"], terminal) == 130


def test_a_reader_that_leaves_early_gets_no_complaint(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "mig_manager", "status", *SPEC],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert "Broken" not in child.stderr.read()
    assert child.returncode == 141


@pytest.mark.parametrize("argv", [("--help",), ("version",), ("apply", "--help"), ("frob",)])
def test_help_and_version_load_nothing_slow(argv: tuple[str, ...]) -> None:
    assert loaded_by(*argv, of=("pynvml", "kubernetes", "grpc", "yaml", "structlog")) == set()


def test_commands_at_a_shell_load_nothing_of_the_cluster(tmp_path: pathlib.Path) -> None:
    found = loaded_by(
        "apply",
        "all-disabled",
        *SPEC,
        of=("kubernetes", "grpc", "watchdog", "pynvml"),
        XDG_STATE_HOME=str(tmp_path),
    )

    # Its GPUs are reached in a process of their own.
    assert found == set()


def loaded_by(*argv: str, of: tuple[str, ...], **environ: str) -> set[str]:
    """Return which of these modules a command line loads."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['mig-manager', *{argv!r}]\n"
        "try:\n"
        "    runpy.run_module('mig_manager', run_name='__main__')\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('\\nLOADED', *(name for name in {of!r} if name in sys.modules))\n"
    )
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", code],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def test_a_terminal_without_box_drawing_gets_ascii(tmp_path: pathlib.Path) -> None:
    done = process("status", *SPEC, XDG_STATE_HOME=str(tmp_path), PYTHONIOENCODING="ascii")

    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "+-----" in done.stdout


def test_colour_can_be_forced_and_is_off_in_a_pipe(tmp_path: pathlib.Path) -> None:
    here = str(tmp_path)

    assert "\x1b[" not in process("status", *SPEC, XDG_STATE_HOME=here).stdout
    assert "\x1b[" in process("status", "--color=always", *SPEC, XDG_STATE_HOME=here).stdout


@pytest.mark.parametrize(
    ("argv", "status"), [(("version",), 0), (("status", "--library-path", "/x"), 1), (("x",), 3)]
)
def test_the_exit_status_reaches_the_shell(argv: tuple[str, ...], status: int) -> None:
    done = process(*argv)

    assert done.returncode == status
    assert "Traceback" not in done.stderr
