"""``validate`` as it is used at a shell and by pre-commit."""

import pathlib
import re
import shlex
from typing import Any

import pytest
import yaml

from mig_manager.catalogue import hardware
from mig_manager.cli.toolkit import validation
from mig_manager.core.layout import layout_parser
from tests.rigs.shell.commandline import Shell
from tests.shell.layout_files import NOWHERE, SEVEN, instances, layouts

ROOT = pathlib.Path(__file__).parents[2]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
SHIPPED = str(ROOT / "profiles/mig-parted.yaml")


SOME_ELSEWHERE = (
    "Some layouts do not fit all of these GPUs; use --must-fit to treat this as an error."
)
EVERY = "Every layout fits the GPUs that it selects."
EIGHT = instances("1g.5gb: 8")
BY_INDEX = SEVEN.replace("all", "[2, 7]")
NOT_CHECKED = "Device indices were not checked: layouts are compared with products"
FOR_A30 = f'device-filter: "0x20B710DE", {SEVEN}'
FOR_H100 = f'device-filter: "*H100*", {SEVEN}'
REPLACED = f"{NOWHERE.replace('all', '[3]')}}}\n  - {{devices: all, mig-enabled: false"
ONE_FOR_ALL_TOO_MUCH_FOR_ONE = f"{SEVEN}}}\n  - {{{EIGHT.replace('all', '[1]')}"


# -- what fails, and what does not ------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "rule", "status", "message"),
    [
        ("A30", SEVEN, 0, SOME_ELSEWHERE),
        ("A30 --gpu A100-SXM4-40GB", SEVEN, 0, SOME_ELSEWHERE),
        ("A30 x", SEVEN, 1, "NVIDIA A30 has no profile 1g.5gb"),
        ("A30 --must-fit", SEVEN, 1, "NVIDIA A30 has no profile 1g.5gb"),
        ("T4", SEVEN, 0, SOME_ELSEWHERE),
        ("T4 x", SEVEN, 1, "T4"),
        ("T4", REPLACED, 0, EVERY),
        ("A100-SXM4-40GB", BY_INDEX, 0, NOT_CHECKED),
        ("A30", NOWHERE, 1, "NVIDIA A30 has no profile 1g.7gb; did you mean 1g.6gb?"),
        ("A30", EIGHT, 1, "NVIDIA A30 has no profile 1g.5gb"),
        ("A30", FOR_A30, 1, "NVIDIA A30 has no profile 1g.5gb"),
        ("A30", FOR_H100, 0, "selects other GPUs No layout selects any of these GPUs."),
        ("A30", instances("1g.6gb: 4"), 0, EVERY),
        ("A30", instances("1g.6gb: 5"), 1, "5x 1g.6gb and the memory slices have room for 4"),
        (
            "A100-SXM4-40GB",
            instances("3g.20gb: 2, 1g.5gb: 1"),
            1,
            (
                "it needs 9 memory slices and the GPU has 8 (2 x 4 + 1 x 1); the largest part "
                "that fits is 2x 3g.20gb (3g.20gb at 0-3, 4-7); then no memory slice is free, "
                "and 1g.5gb can only be at 0-6"
            ),
        ),
        ("A100-SXM4-40GB", ONE_FOR_ALL_TOO_MUCH_FOR_ONE, 1, "layouts.yaml:5:5]"),
    ],
)
def test_a_layout_that_must_fit_or_fits_nowhere_fails(
    shell: Shell, gpus: str, rule: str, status: int, message: str
) -> None:
    answer = shell("validate", "-f", shell.file(layouts(x=rule)), "--gpu", *gpus.split())

    assert answer.status == status
    assert message in re.sub(r"\s+", " ", answer.out)
    assert (NOT_CHECKED in re.sub(r"\s+", " ", answer.out)) == ("devices: [" in rule)


def test_a_node_distinguishes_layouts_that_fit_other_gpus(shell: Shell) -> None:
    file = shell.file(layouts(seven=SEVEN, eight=EIGHT, a30=FOR_A30, third=BY_INDEX))

    answer = shell("validate", "-f", file, "--simulate", "1xA30", "-o", "json")

    verdicts = {each["layout"]: each for each in answer.data["verdicts"]}
    assert {name: each["fit"] for name, each in verdicts.items()} == {
        "seven": "elsewhere",
        "eight": "does-not-fit",
        "a30": "does-not-fit",
        "third": "does-not-fit",
    }
    assert verdicts["third"]["why"].startswith("layout 'third' names GPU 2, and this node has 1")
    assert verdicts["a30"]["place"] == f"{file}:8:5"
    assert answer.status == 1


def test_validate_has_a_verdict_for_each_product_of_a_mixed_node(shell: Shell) -> None:
    file = shell.file(layouts(seven=SEVEN))
    node = ("--simulate", "1xA100-SXM4-40GB+1xA30")

    verdicts = shell("validate", "seven", "-f", file, *node, "-o", "json").data["verdicts"]

    assert {each["product"]: each["fit"] for each in verdicts} == {
        "NVIDIA A100-SXM4-40GB": "fits",
        "NVIDIA A30": "does-not-fit",
    }


def test_a_filter_by_a_name_that_no_product_has_is_pointed_at(shell: Shell) -> None:
    file = shell.file(layouts(x=f"device-filter: A100, {SEVEN}", y=FOR_H100))

    answer = shell("validate", "-f", file, "--gpu", "H100")

    assert f"{file}:4:21: unknown product 'a100'; did you mean '*a100*'?" in (answer.err)
    assert "*h100*" not in answer.err
    for name in [name for product in hardware.products().values() for name in product.names]:
        document = layout_parser.parse(layouts(x=f'device-filter: "{name}", {SEVEN}'), source="f")
        assert not validation.unknown_names(document)


def test_the_table_is_followed_by_why_layouts_fit_other_gpus_only(shell: Shell) -> None:
    file = shell.file(layouts(seven=SEVEN, too=SEVEN, ten=instances("1g.10gb: 7")))
    products = ("A30", "A100-SXM4-40GB", "A100-PCIE-40GB", "T4")

    text = shell("validate", "-f", file, *(f"--gpu={each}" for each in products)).out

    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- NVIDIA A30: seven, too (no profile 1g.5gb); ten (no profile 1g.10gb)",
        "- NVIDIA A100-SXM4-40GB, NVIDIA A100-PCIE-40GB: ten (no room for all its instances)",
        "- Tesla T4: seven, too, ten (no MIG)",
    ]


def test_layouts_for_other_gpus_are_counted_once(shell: Shell) -> None:
    text = shell("validate", "-f", SHIPPED, "--gpu", "A30").out
    without_mig = shell("validate", "-f", SHIPPED, "--gpu", "T4").out

    assert "Without MIG: Tesla T4" in without_mig.splitlines()
    assert "Without MIG" not in text
    numbers = [line for line in text.splitlines() if re.search(r"\d+ (more )?layout", line)]
    others = len(layout_parser.parse(pathlib.Path(SHIPPED).read_text(), source="f").layouts) - 8
    assert numbers == [f"{others} more layouts for other GPUs; -o json has the reasons"]
    assert "no profile" not in text
    assert "all-1g.6gb" in text
    assert not re.search(r"^all-1g.18gb ", text, re.MULTILINE)
    assert "Some layouts do not fit" not in text
    assert (
        "The layouts shown fit; use --must-fit to treat those for other GPUs as an error." in text
    )


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ("{config.yaml: 'version: v1'}", r"config\.yaml"),
        ("{mig-parted: 'version: v1'}", "mig-parted"),
        ("{}", r"config\.yaml"),
        ("[1]", r"config\.yaml"),
        (r"{a'b: x}", r"config\.yaml"),
    ],
)
def test_a_config_map_is_refused_with_how_to_extract_its_file(
    shell: Shell, data: str, key: str
) -> None:
    manifest = f"apiVersion: v1\ndata: {data}\nkind: ConfigMap\n"

    answer = shell("validate", "-f", shell.file(manifest), "--gpu", "A30")

    command = f"kubectl get configmap NAME -n NAMESPACE -o jsonpath='{{.data.{key}}}' > layouts.y"
    assert answer.status == 2
    assert command in " ".join(answer.err.split())


@pytest.mark.parametrize("content", ["", "# none\n", "version: v1\n"])
def test_a_file_without_layouts_is_not_valid(shell: Shell, content: str) -> None:
    file = shell.file(content)

    for argv in (("-f", file), ("--files", file), ("-f", file, "--portable")):
        answer = shell("validate", *argv, "--gpu", "A30")
        assert answer.status != 0
        assert f"{file} has no layouts" in answer.err


def test_a_family_means_all_its_products_and_is_spelt_out(shell: Shell) -> None:
    answer = shell("validate", "-f", shell.file(layouts(seven=SEVEN)), "--gpu", "A100")

    assert "A100 means A100-SXM4-40GB, A100-PCIE-40GB, " in answer.err
    assert "NVIDIA A100-SXM4-80GB" in answer.out
    assert "H100 means H100-SXM5-80GB, " in shell("validate", "-f", SHIPPED, "--gpu", "H100").err


def test_many_products_are_counted_rather_than_listed(shell: Shell) -> None:
    answer = shell("validate", "-f", shell.file(layouts(seven=SEVEN)), "--gpu", "*")

    assert re.search(r"^seven +[y✓] \d+ +- \d+$", answer.out, re.MULTILINE)


# -- portable, and several files as pre-commit names them -------------------------------------


PORTABLE = layouts(x=f'device-filter: "0x20B010DE", {SEVEN}')
WITH_PLACEMENT = layouts(
    x="device-filter: A30, devices: 0, mig-enabled: true, mig-devices: {1g.6gb@3: 1}"
)


def test_every_position_that_is_not_portable_is_named(shell: Shell) -> None:
    file = shell.file(WITH_PLACEMENT)

    answer = shell("validate", "--portable", "-f", file)
    data = shell("validate", "--portable", "-f", file, "-o", "json").data

    assert answer.status == 1
    assert re.findall(rf"{re.escape(file)}:(\d+:\d+):\s", answer.out) == ["4:21", "4:35", "4:71"]
    assert (data["isValid"], len(data["notPortable"])) == (False, 3)
    assert shell("validate", "-f", file, "--gpu", "A30").status == 0


def test_a_portable_document_is_called_portable_whether_it_fits_or_not(shell: Shell) -> None:
    for text, options, status in ((PORTABLE, (), 0), (layouts(x=FOR_A30), ("--gpu", "A30"), 1)):
        answer = shell("validate", "--portable", "-f", shell.file(text), *options)

        assert answer.status == status
        assert "nvidia-mig-parted understands all of it." in answer.out


TEXTS = {"good": PORTABLE, "misfit": layouts(x=NOWHERE), "broken": "version: v2\n"}


def named_files(shell: Shell, names: str) -> list[str]:
    return [shell.file(TEXTS[name], f"{name}.yaml") for name in names.split()]


@pytest.mark.parametrize(
    ("names", "status", "last_line"),
    [
        ("good", 0, EVERY),
        ("misfit", 1, "1 of 1 layout does not fit."),
        ("broken", 2, "1 of 1 file is invalid."),
        ("good broken misfit", 2, "1 of 3 files is invalid."),
    ],
)
def test_the_worst_of_several_files_decides_the_exit_status(
    shell: Shell, names: str, status: int, last_line: str
) -> None:
    answer = shell("validate", "--files", "--gpu", "A100-SXM4-40GB", *named_files(shell, names))

    assert answer.status == status
    assert answer.out.splitlines()[-1] == last_line


def test_a_broken_file_hides_no_problem_of_the_others(shell: Shell) -> None:
    good, broken, misfit = named_files(shell, "good broken misfit")

    answer = shell("validate", "--files", "--gpu", "*", good, broken, misfit)

    assert f"{broken}:1:10: version must be the text v1" in answer.err
    assert "remedy: Correct the file at the named line" in answer.err
    assert good in answer.out
    assert "1g.7gb" in answer.out


@pytest.mark.parametrize(("names", "verdicts"), [("good", [True]), ("good broken", [True, False])])
def test_the_json_answer_has_a_verdict_for_each_file(
    shell: Shell, names: str, verdicts: list[bool]
) -> None:
    files = named_files(shell, names)

    data = shell("validate", "--files", "--portable", "-o", "json", *files).data

    assert data["isValid"] is all(verdicts)
    assert [(each["source"], each["isValid"]) for each in data["files"]] == [
        *zip(files, verdicts, strict=True)
    ]
    errors = [each["error"] for each in data["files"] if not each["isValid"]]
    assert all(text.startswith(f"{files[-1]}:1:10: version must be") for text in errors)


def test_no_file_to_check_is_a_usage_error(shell: Shell) -> None:
    answer = shell("validate", "--files")

    assert answer.status == 2
    assert "--files: name the layout files to check" in answer.err


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: str(hook["id"]))
def test_the_hooks_take_good_documents_and_refuse_bad_ones(
    shell: Shell, hook: dict[str, Any]
) -> None:
    # What pre-commit runs: the entry, the arguments, the names of files.
    arguments: list[str] = hook.get("args", [])
    program, *command = [*shlex.split(hook["entry"]), *arguments]
    good = shell.file(PORTABLE, "good.yaml")
    bad = shell.file(WITH_PLACEMENT.replace("1g.6gb@3", "1g.7gb@3"))

    assert hook["id"] in {"mig-manager-validate", "mig-manager-portable"}
    assert program == "mig-manager"
    assert shell(*command, SHIPPED).status == 0
    assert shell(*command, good, bad).status == 1
    assert {"id", "name", "entry", "language", "files"} <= hook.keys()
    assert hook["language"] == "python"
    named = ("profiles/mig-parted.yaml", "mig-config-h200.yml", "values.yaml")
    assert [bool(re.search(hook["files"], name)) for name in named] == [True, True, False]


def test_every_error_of_a_file_is_reported_with_its_place(shell: Shell) -> None:
    file = shell.file(
        layouts(
            one="devices: all, mig-enabled: true, mig-devices: {1g.5bg: 1, 2g10gb: 1, 1g.5gb: x}",
            two=f"{SEVEN}, {SEVEN[:12]}}}\n  - {{device: all, mig-enabled: ture",
        )
    )

    for words in (("validate", "-f", file), ("validate", "--files", file)):
        answer = shell(*words, "--gpu", "A30", COLUMNS="500")

        listed = re.findall(rf"{re.escape(file)}:([0-9]+):[0-9]+: (.*)", answer.err)
        assert [(line, text[:40]) for line, text in listed] == [
            ("4", "'1g.5bg' is not a MIG profile; did you me"[:40]),
            ("4", "'2g10gb' is not a MIG profile; did you me"[:40]),
            ("4", "the count of 1g.5gb must be a whole number"[:40]),
            ("6", "key 'devices' is given twice; the first i"[:40]),
            ("7", "unexpected key 'device'; did you mean 'de"[:40]),
            ("7", "mig-enabled must be true or false, withou"[:40]),
        ]
        assert "did you mean '2g.10gb'?" in answer.err
    assert shell("validate", "-f", file, "--gpu", "A30").status == 2


def test_a_long_list_of_errors_ends_with_a_count(shell: Shell) -> None:
    names = [f"l{number}" for number in range(30)]
    file = shell.file(layouts(**dict.fromkeys(names, "devices: x, mig-enabled: true")))

    err = shell("validate", "-f", file, "--gpu", "A30").err

    assert err.count("layouts.yaml:") == 20
    assert "40 more errors" in err
