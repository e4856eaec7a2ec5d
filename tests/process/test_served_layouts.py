"""Generated layouts with the real agent process: a product that no table knows, and hot reload."""

import dataclasses
import pathlib
import sys

import pytest

from mig_manager.catalogue import hardware, product_table
from mig_manager.core.layout import layout_list
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import machines
from mig_manager.sandbox.node import objects
from tests.rigs.driver import c_library
from tests.rigs.stage import agent_stage

UNKNOWN = "NVIDIA Q900-SXM9-120GB"
GENERATED = "generated for NVIDIA A100-SXM4-40GB"
OWNERS_FILE = """\
version: v1
mig-configs:
  team-a:
  - {devices: all, mig-enabled: true, mig-devices: {4g.20gb: 1}}
  all-balanced:
  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
"""


def tripled_product() -> product_table.Product:
    """Make up a product with the slices of an A100 and three times its memory."""
    product = hardware.find("A100-SXM4-40GB")

    def row(of: product_table.GpuProfile) -> product_table.GpuProfile:
        profile = dataclasses.replace(of.profile, memory_gb=3 * of.profile.memory_gb)
        return dataclasses.replace(
            of, name=str(profile), profile=profile, memory_mib=3 * of.memory_mib
        )

    return dataclasses.replace(
        product,
        key="q900",
        names=(UNKNOWN,),
        pci_device_ids=(0x9999_10DE,),
        memory_mib=3 * product.memory_mib,
        profiles=tuple(map(row, product.profiles)),
    )


class UnknownStage(agent_stage.AgentStage):
    """A stage whose agent has no layout file."""

    def arguments(self, machine: machines.Machine) -> list[str]:
        arguments = super().arguments(machine)
        at = arguments.index("--config-file")
        return arguments[:at] + arguments[at + 2 :]


def origins_by_layout(stage: agent_stage.AgentStage) -> dict[str, str]:
    text = objects.annotations(stage.node()).get(well_known.LAYOUTS_ANNOTATION)
    return {each.name: each.origin for each in layout_list.from_json(text).layouts} if text else {}


@pytest.mark.slow
def test_a_product_in_no_table_has_the_usual_layouts_without_any_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = tripled_product()
    monkeypatch.setattr(hardware, "parse_node", lambda _spec: (product, product))
    for name, value in c_library.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "mig_manager", "plan", "all-1g.15gb"]

    with UnknownStage(f"2x{product.key}", text="", has_library=True) as stage:
        planned = c_library.run(*command, "--library-path", str(stage.library))
        assert f"Origin: generated for {UNKNOWN}" in planned

        stage.apply_layout("all-1g.15gb")

        assert stage.allocatable() == {"nvidia.com/mig-1g.15gb": 14}
        assert stage.status()["origin"] == f"generated for {UNKNOWN}"
        usual = {"all-balanced", "all-disabled", "all-enabled", "all-7g.120gb"}
        assert usual <= origins_by_layout(stage).keys()


@pytest.mark.slow
def test_a_file_that_is_edited_is_served_and_no_generated_layout_is_lost() -> None:
    with agent_stage.AgentStage("1xA100-SXM4-40GB", text=OWNERS_FILE) as stage:
        origins = {}
        for layout in ("all-balanced", "all-2g.10gb", "team-a"):
            stage.apply_layout(layout)
            origins[layout] = stage.status()["origin"]
        before = origins_by_layout(stage)
        file = str(stage.config_file)
        assert origins == {
            "all-balanced": f"{file}:5", "all-2g.10gb": GENERATED, "team-a": f"{file}:3",
        }  # fmt: skip
        assert {name: before[name] for name in origins} == origins

        stage.config_file.write_text(OWNERS_FILE.replace("4g.20gb: 1", "7g.40gb: 1"))

        stage.wait(lambda: stage.allocatable() == {"nvidia.com/mig-7g.40gb": 1}, "the new layout")
        assert stage.wait_for_end("team-a") is run_status.State.SUCCESS
        assert origins_by_layout(stage) == before
        stage.apply_layout("all-2g.10gb")
        assert stage.status()["origin"] == GENERATED
