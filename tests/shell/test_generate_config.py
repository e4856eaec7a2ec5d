"""``mig-manager generate-config``: for a node, for products, into a file."""

import pathlib

import pytest

from tests.rigs.shell.commandline import Shell

SPEC = ("--simulate", "1xA30")


def test_a_node_and_its_products_give_the_same_document(shell: Shell) -> None:
    node = shell("generate-config", "--simulate", "2xA100-SXM4-80GB+1xA30")
    named = shell("generate-config", "--gpu", "A100-SXM4-80GB", "--gpu", "NVIDIA A30")

    assert (node.status, named.status) == (0, 0)
    assert node.out == named.out
    assert named.err == ""


@pytest.mark.slow
def test_mixed_layouts_come_on_request_and_can_be_applied(shell: Shell) -> None:
    plain = shell("generate-config", *SPEC)
    mixed = shell("generate-config", "--all-maximal", *SPEC)

    assert "max-" not in plain.out
    name = "max-2g.12gb_1g.6gb.me_1g.6gb"
    assert name in mixed.out
    applied = shell("apply", "-f", "-", "-c", name, *SPEC, stdin=mixed.out)
    assert applied.status == 0
    (gpu,) = shell("status", "-o", "json", *SPEC).data["gpus"]
    made = [each["profile"] for each in gpu["gpuInstances"]]
    assert sorted(made) == ["1g.6gb", "1g.6gb+me", "2g.12gb"]


def test_products_without_known_slices_are_left_out_with_a_remark(shell: Shell) -> None:
    answer = shell("generate-config", "--gpu", "*RTX*PRO*")

    assert answer.status == 0
    assert "is left out" in answer.err


def test_only_a_document_that_can_be_generated_replaces_the_file(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    target, missing = tmp_path / "config.yaml", tmp_path / "missing" / "x.yaml"
    target.write_text("precious")

    assert shell("generate-config", "-f", str(target), "--gpu", "T4").status == 2
    assert target.read_text() == "precious"

    assert shell("generate-config", "-f", str(target), "--gpu", "A30").status == 0
    assert target.read_text() == shell("generate-config", "--gpu", "A30").out
    answer = shell("generate-config", "-f", str(missing), "--gpu", "A30")
    assert answer.status == 2
    assert f"cannot write {missing}: No such file or directory" in answer.err


def test_a_device_is_written_to_and_a_dash_is_standard_output(shell: Shell) -> None:
    assert shell("generate-config", "-f", "/dev/null", "--gpu", "A30").status == 0
    assert pathlib.Path("/dev/null").is_char_device()
    assert shell("generate-config", "-f", "-", "--gpu", "A30").out.startswith("version: v1")
