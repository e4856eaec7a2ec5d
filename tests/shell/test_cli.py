"""The command line as people, scripts and NVIDIA's units use it, over simulated GPUs."""

import pathlib
import re
import shlex

import pytest

from mig_manager.adapters.host import lock_file
from mig_manager.core import model
from mig_manager.core.files import yaml_text, yaml_tree
from mig_manager.core.records import journals
from mig_manager.sandbox.driver import state_file, states
from tests.rigs.node import fakes, samples
from tests.rigs.shell.commandline import ONE_LAYOUT, SPEC, Answer, Shell

ROOT = pathlib.Path(__file__).parents[2]
KUSTOMIZATION = str(ROOT / "deploy" / "kustomization.yaml")
PROFILES = str(ROOT / "profiles" / "mig-parted.yaml")
VALIDATE = f"'mig-manager validate {' '.join(SPEC)}'"
GLOB = "*A3[0']*"
TOO_LONG = "a" * 300  # longer than a file's name may be
LAYOUTS = f"""{ONE_LAYOUT}\
  too-much:
  - devices: all
    mig-enabled: true
    mig-devices: {{1g.5gb: 8}}
  other:
  - devices: all
    mig-enabled: false
"""


@pytest.fixture
def layouts(shell: Shell) -> str:
    return shell.file(LAYOUTS)


def test_apply_and_assert_print_the_messages_of_nvidias_tool(shell: Shell, layouts: str) -> None:
    def run(command: str, *more: str) -> Answer:
        return shell(command, "one", "-f", layouts, *more, *SPEC)

    before, planned, data = run("assert"), run("plan"), run("assert", "-o", "json")
    applied, again, asserted = run("apply"), run("apply"), run("assert")

    assert (before.status, before.out, data.status) == (1, "", 1)
    assert "layout 'one' is not applied: GPU 0: the whole GPU, not partitioned" in before.err
    assert data.data["isApplied"] is False
    assert "MIG off → on, resets the GPU" in planned.out
    assert "Layout one: 0 instances destroyed, 10 created" in planned.out
    assert (applied.status, applied.out) == (0, "MIG configuration applied successfully\n")
    assert "0 instances destroyed, 10 created, 0 kept" in applied.err
    assert (again.status, again.out) == (0, applied.out)
    assert "layout 'one' is already active" in again.err
    assert asserted.out == "Selected MIG configuration currently applied\n"
    assert run("assert", "--fresh").status == 1


def test_layout_may_be_the_only_one_of_its_file(shell: Shell, layouts: str) -> None:
    several = shell("plan", "-f", layouts, *SPEC)

    assert several.status == 2
    assert f"name a layout; {layouts} has one, other for these GPUs" in several.err
    assert shell("plan", "-f", "-", *SPEC, stdin=ONE_LAYOUT).status == 0
    assert shell("plan", "all-disabled", *SPEC).status == 0


@pytest.mark.slow
def test_export_writes_a_document_that_assert_accepts(shell: Shell, layouts: str) -> None:
    shell("apply", "one", "-f", layouts, *SPEC)

    wide = shell("status", "-o", "wide", *SPEC).out
    assert "MIG-" in wide
    assert wide.count("3g.20gb  4:4") + wide.count("3g.20gb  0:4") == 2
    for extra in ((), ("-o", "json")):
        exported = shell("export", "-l", "now", *extra, *SPEC)
        answer = shell("assert", "now", "-f", "-", *SPEC, stdin=exported.out)
        assert (exported.status, answer.status) == (0, 0)


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("plan", "all-disabled"),
        ("apply", "all-disabled"),
        ("assert", "all-disabled"),
        ("validate", "all-disabled"),
        ("export",),
        ("generate-config",),
    ],
)
def test_every_answer_can_be_had_as_json_and_yaml(shell: Shell, argv: tuple[str, ...]) -> None:
    as_json = shell(*argv, "-o", "json", *SPEC)
    as_yaml = shell(*argv, "-o", "yaml", *SPEC)

    parsed = yaml_tree.plain(yaml_text.parse(as_yaml.out, source="out"))
    assert as_json.data == parsed
    assert (as_json.status, as_yaml.status) == (0, 0)
    if argv[0] in {"export", "generate-config"}:
        assert as_yaml.out.startswith("version: v1\nmig-configs:\n")
        assert shell(*argv, *SPEC).out == as_yaml.out


@pytest.mark.parametrize("argv", [("export",), ("checkpoint", "-f")])
def test_a_change_under_way_is_named_beside_the_layout_it_may_halve(
    shell: Shell, tmp_path: pathlib.Path, argv: tuple[str, ...]
) -> None:
    suffixes = ("", ".manager.lock", ".journal", ".checkpoint")
    state, lock, journal, file = (tmp_path / f"s{each}" for each in suffixes)
    argv += (str(file),) if "-f" in argv else ()
    argv += ("--simulate-state", str(state), *SPEC)
    manager = lock_file.LockFile(lock, program="x", clock=fakes.FakeClock(), is_required=True)
    entries = journals.GpuEntries(snapshots=(samples.gpu(samples.A100).snapshot,))

    alone = shell(*argv)
    journal.write_text(journals.Journal(layout="night", gpus=entries).to_json())
    killed = shell(*argv)
    with manager.hold("night"):
        changing = shell(*argv)
    with manager.hold("night", changes_gpus=False):
        checking = shell(*argv)

    assert alone.out == killed.out == changing.out
    assert "warning" not in alone.err
    assert "warning: the change to layout 'night' was left unfinished; the next" in killed.err
    assert re.search(r"warning: x \(.*\bis changing the GPUs", changing.err, re.DOTALL)
    assert checking.err == killed.err


def test_an_agent_without_a_cluster_writes_no_log(shell: Shell, tmp_path: pathlib.Path) -> None:
    missing = str(tmp_path / "missing")

    answer = shell("agent", *SPEC, "--node-name", "n", "--kubeconfig", missing)

    assert answer.status == 2
    assert answer.err.startswith("mig-manager: no credentials for a Kubernetes API")


def test_plan_and_validate_say_where_a_layout_comes_from(shell: Shell, layouts: str) -> None:
    line = pathlib.Path(layouts).read_text().splitlines().index("  one:") + 1

    plan = shell("plan", "one", "-f", layouts, *SPEC)
    data = shell("plan", "one", "-f", layouts, "-o", "json", *SPEC).data
    checked = shell("validate", "one", "-f", layouts, "-o", "json", *SPEC).data

    assert f"Origin: {layouts}:{line}" in plan.out.replace("\n  ", " ")
    assert data["origin"] == f"{layouts}:{line}"
    assert [each["origin"] for each in checked["verdicts"]] == [f"{layouts}:{line}"]


def test_a_variable_for_the_format_leaves_valid_config_a_text(shell: Shell, layouts: str) -> None:
    words = ("assert", "one", "-f", layouts, "--valid-config")

    answer = shell(*words, *SPEC, MIG_MANAGER_OUTPUT_FORMAT="json")

    assert (answer.status, answer.out) == (0, "Selected MIG configuration is valid\n")


def test_plan_and_validate_name_mig_strategies_without_the_layout(
    shell: Shell, layouts: str
) -> None:
    plan = shell("plan", "one", "-f", layouts, *SPEC)
    data = shell("plan", "one", "-f", layouts, "-o", "json", *SPEC).data
    validated = shell("validate", "-f", layouts, "one", "--gpu", "A100-SXM4-40GB")

    sentence = "Not for a device plugin with MIG strategy single: MIG devices differ: 1g.5gb"
    assert sentence in plan.out
    assert data["unservedMigStrategies"].keys() == {"single"}
    assert "Not for MIG strategy single: one" in validated.out


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("--simulate", "H100", "status"), 2, "belongs after the command"),
        (("--simulate=H100", "status"), 2, "belongs after the command"),
        (("-o", "json", "status"), 2, "-o belongs after the command: mig-manager COMMAND -o"),
        (("frobnicate",), 3, "unknown command 'frobnicate'"),
        (("", "status"), 3, "unknown command ''"),
        (("aply",), 3, "did you mean 'apply'?"),
        (("help", "aply"), 3, "did you mean 'apply'?"),
        (("assert", "all-disabled", "-a", "-o", "json"), 2, "--valid-config answers with text"),
        (("completion",), 2, "supported: bash, zsh, fish"),
        (("completion", "tcsh"), 2, "supported: bash, zsh, fish"),
        (("apply", "--frob"), 2, "--frob"),
        (("apply", "a", "b"), 2, "unrecognized arguments: b"),
        (("apply", "--config-file"), 2, "expected one argument"),
        (("apply", "--select", "x"), 2, "unrecognized arguments"),
        (("apply", "x", "-f", "/nonexistent"), 2, "cannot read /nonexistent"),
        (("apply", "x", "-f", "/"), 2, "cannot read /"),
        (("apply", "no-such", "--simulate", "1xA30"), 2, "unknown layout 'no-such'"),
        (("apply", "--simulate", "1xA30"), 2, "all-balanced, all-1g.6gb,"),
        (("apply", __file__, *SPEC), 2, f"'{__file__}' is a file: write -f {__file__}"),
        (("validate", __file__, "--gpu", "A30"), 2, f"is a file: write -f {__file__}"),
        (("plan", TOO_LONG, *SPEC), 2, f"unknown layout '{TOO_LONG}'"),
        (
            ("apply", "all-disabled", *SPEC, "--journal-file", TOO_LONG),
            2,
            "cannot read the journal",
        ),
        (("plan", "x", "-f", "/dev/null", *SPEC), 2, "/dev/null has no layouts"),
        (("plan", "-f", "/dev/null", *SPEC), 2, "/dev/null has no layouts"),
        (("apply", "all-disabled", "-k", "/hooks.yaml"), 2, "cannot read /hooks.yaml"),
        (("apply", "all-disabled", "--hook-timeout-s", "0"), 2, "--hook-timeout-s: '0' is not"),
        (("capacity",), 3, "unknown command 'capacity'; run 'kubectl mig capacity'"),
        (("checkpoint",), 2, "name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE"),
        (("restore",), 2, "name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE"),
        (("restore", "-f", "/no/checkpoint"), 2, "cannot read /no/checkpoint"),
        (("restore", "-f", "/dev/null", *SPEC), 2, "/dev/null:1:1: "),
        (("checkpoint", "-f", "/no/c.json", *SPEC), 2, "cannot write /no/c.json"),
        (("status", "--simulate", "banana"), 2, "banana"),
        (("status", "--simulate", "1xA30", "--library-path", "/x.so"), 2, "one or the other"),
        (("status", "--library-path", "/nonexistent.so"), 1, "/nonexistent.so"),
        (("status", "-o", "xml"), 2, "one of text, wide, json, yaml"),
        (("status", "--color", "pink"), 2, "auto, always, never"),
        (
            ("status", *SPEC, "--simulate-state", "/proc/x"),
            2,
            "cannot save simulated GPUs in /proc/x",
        ),
        (("status", *SPEC, "--simulate-event", "9=lost"), 2, "neither reboot nor INDEX=EVENT"),
        (("status", *SPEC, "--simulate-event", "0=tired"), 2, "one of lost, none, gpu-reset"),
        (("status", "--simulate-event", "reboot"), 2, "is for simulated GPUs; name them with"),
        (("status", "--simulate", "8*H100"), 2, "write '8xA100-SXM4-40GB' or"),
        (("status", "--simulate", "8xA100-SXM4-40G"), 2, "did you mean 'A100-SXM4-40GB'"),
        (("status", "--simulate", "100000xA30"), 2, "a node has 1 to 16 GPUs"),
        (("generate-config", "--gpu", "T4"), 2, "Tesla T4 has no MIG"),
        (("rollout", "x", "-l", "a in ("), 2, "is not a label selector"),
        (("rollout", "x", "-l", "a=b", "--max-unavailable", "0"), 2, "at least 1"),
        (("rollout", "x", "-l", "a=b", "--kubeconfig", "/no/kubeconfig"), 2, "no such file"),
        (("partitioner", "recommend"), 2, "unexpected 'recommend'"),
        (("validate", "--gpu", "banana"), 2, "unknown GPU 'banana'"),
        (("validate", "--gpu", "A10"), 2, "unknown GPU 'A10'; did you mean 'A100'?"),
        (("plan", "all-1g.5bg", *SPEC), 2, "'all-1g.5gb' or 'all-1g.5gb.me' or 'all-1g.10gb'?"),
        (("demo", "--scenario", "x"), 2, "choose from one-slice, "),
        (("agent",), 2, "--node-name"),
        (("agent", "-n", "n", "--drain-timeout-s", "soon"), 2, "--drain-timeout-s: 'soon'"),
        (("apply", ""), 2, "the value is empty"),
        (("apply", "all-disabled", "--skip-reset="), 2, "the value is empty"),
        (("apply", "all-disabled", "--simulate="), 2, "the value is empty"),
        (("agent", "-n", "n1", "--with-reboot="), 2, "the value is empty"),
        (("rollout", "", "-l", "a=b"), 2, "the value is empty"),
        (("apply", "--skip-rest"), 2, "--skip-rest; did you mean '--skip-reset'?"),
        (("status", "--simulat=1xA30"), 2, "--simulat=1xA30; did you mean '--simulate'?"),
        (("rollout", "--max-unavailible", "2"), 2, "did you mean '--max-unavailable'?"),
        (("apply", "x", "--dry-run", "--skip-reset"), 2, "--dry-run shows no effect"),
        (("status", "--watch", "-o", "json", *SPEC), 2, "--watch shows text"),
        (("support-bundle", *SPEC, "--output-file", "/no/x"), 2, "cannot write /no/x"),
        (("demo", "--nodes", "5", "--scenario", "budget"), 2, "exclude each other"),
        (("demo", "--simulate", "T4"), 2, "Tesla T4 cannot be partitioned; name a GPU with MIG"),
        (("demo", "--nodes", "3"), 2, "'3' is not a number of nodes from 5 to 20"),
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


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (
            ("apply", "--frob"),
            "See 'mig-manager apply --help' (example: mig-manager apply all-1g.5gb).",
        ),
        (("frobnicate", "status"), "See 'mig-manager --help'."),
        (("validate", "-f", "/no/file"), "Check the file's path and rights, or"),
        (("apply", "x", "-f", "/"), "or name another file"),
        (("validate", "-f", "/dev/zero"), "Name a smaller file."),
        (
            ("checkpoint", "-f", "/no/c.json", *SPEC),
            "Check the path, your rights and the free space.",
        ),
        (("status", "--simulate", "banana"), "Known are A30, A100-SXM4-40GB, "),
        (("validate", "--gpu", "banana"), "Known are A30, A100-SXM4-40GB, "),
        (("schema", "banana"), "'mig-manager schema' lists the names."),
        (("plan", *SPEC), f"{VALIDATE} shows which ones fit."),
        (("plan", "all-1g.5gb", "--simulate", "1xA30"), "--simulate 1xA30' lists them."),
        (
            ("plan", "banana", *SPEC),
            f"Name a layout that {VALIDATE} lists, or a file that has this one: -f FILE.",
        ),
        (("plan", "x", "-f", PROFILES, "--simulate=1xA30"), f" -f {PROFILES} --simulate=1xA30'"),
        (("plan", "x", f"-f{PROFILES}", "--simulate=1xA30"), f" -f{PROFILES} --simulate=1xA30'"),
        (("plan", "x", "-config-file", PROFILES, *SPEC), f" --config-file {PROFILES} {SPEC[0]}"),
        (
            ("validate", "x", "--gpu", GLOB),
            f"that mig-manager validate --gpu {shlex.quote(GLOB)} lists",
        ),
        (
            ("apply", "all-disabled", *SPEC, "--journal-file", TOO_LONG),
            "another file with --journal-file.",
        ),
        (("apply", "x", "-f", KUSTOMIZATION), "Name a file with 'mig-configs'."),
        (("checkpoint", "now.json"), "Name the file with -f FILE."),
        (("status", "sandbox"), "For the nodes of a cluster, run 'kubectl mig status'."),
        (("rollout", "all-balanced", "node-7"), "Select the nodes by labels: -l SELECTOR."),
    ],
)
def test_remedy_of_bad_input_helps(shell: Shell, argv: tuple[str, ...], remedy: str) -> None:
    assert remedy in shell(*argv).err.partition("  remedy: ")[2]


@pytest.mark.parametrize("rest", [(), ("-o", "json")])
def test_a_dry_run_of_apply_is_plan_and_changes_nothing(
    shell: Shell, rest: tuple[str, ...]
) -> None:
    argv = ("all-balanced", "--simulate", "1xA30", *rest)
    before = shell("status", "--simulate", "1xA30").out

    dry, plan = shell("apply", "--dry-run", *argv), shell("plan", *argv)

    assert (dry.status, dry.out) == (plan.status, plan.out)
    assert "all-balanced" in dry.out
    assert shell("status", "--simulate", "1xA30").out == before


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (("status",), "add --simulate 1xA100-SXM4-40GB."),
        (("--debug", "status"), "add --simulate 1xA100-SXM4-40GB."),
        (("plan", "all-disabled"), "add --simulate 1xA100-SXM4-40GB."),
        (("export",), "add --simulate 1xA100-SXM4-40GB."),
        (("apply", "all-disabled"), "add --simulate 1xA100-SXM4-40GB."),
        (
            ("apply", "all-disabled", "--lock-file", "/proc/lock"),
            "add --simulate 1xA100-SXM4-40GB.",
        ),
        (("validate",), "name a product: --gpu A100-SXM4-40GB."),
        (("generate-config",), "name a product: --gpu A100-SXM4-40GB."),
    ],
)
def test_without_a_driver_a_command_that_reads_names_an_alternative(
    shell: Shell, tmp_path: pathlib.Path, argv: tuple[str, ...], hint: str
) -> None:
    # Not the machine's own.
    files = {f"MIG_MANAGER_{name}_FILE": str(tmp_path / name) for name in ("LOCK", "JOURNAL")}

    answer = shell(*argv, "--library-path", "/nonexistent.so", **files)

    assert answer.status == 1
    assert "Load the NVIDIA driver, or name where it is (--driver-root, such as" in answer.err
    assert answer.err.endswith(f"{hint}\n")


def test_hooks_file_of_the_environment_can_be_switched_off(shell: Shell) -> None:
    argv = ("apply", "all-disabled", *SPEC)

    assert shell(*argv, MIG_PARTED_HOOKS_FILE="/hooks.yaml").status == 2
    assert shell(*argv, MIG_PARTED_HOOKS_FILE="").status == 0


@pytest.mark.slow
def test_plan_and_apply_on_a_vgpu_host_name_the_remedy(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "gpus.json"
    host = states.Options(virtualization=model.Virtualization.HOST)
    state_file.SharedState(path).create("2xA100-SXM4-40GB", options=host)
    remedy = "GPU 0-1; stop the machines with vGPUs"

    planned = shell("plan", "all-1g.5gb", "--simulate-state", str(path))
    data = shell("plan", "all-1g.5gb", "-o", "json", "--simulate-state", str(path)).data
    applied = shell("apply", "all-1g.5gb", "--simulate-state", str(path))
    again = shell("apply", "all-1g.5gb", "--simulate-state", str(path))

    assert [remedy in answer.err for answer in (planned, applied, again)] == [True, True, False]
    assert [remedy in warning for warning in data["warnings"]] == [True]
    assert applied.status == 0
