"""What commands decide and return, over GPUs in memory."""

import dataclasses
from collections.abc import Iterable, Mapping

from mig_manager.catalogue import hardware
from mig_manager.cli.toolkit import gpu_text
from mig_manager.core import model
from mig_manager.core.answers import gpu_answers
from mig_manager.core.display import bar
from mig_manager.core.layout import config, layout_fit, layouts, plans
from mig_manager.core.node import gpu_use
from mig_manager.core.objects import pod_object
from tests.rigs.node.local_rig import LocalRig

A100 = hardware.find("A100-SXM4-40GB")
A30 = hardware.find("A30")

LAYOUTS = """
version: v1
mig-configs:
  balanced:
  - {devices: all, device-filter: "0x20B010DE", mig-enabled: true,
     mig-devices: {1g.5gb: 2, 2g.10gb: 1, 3g.20gb: 1}}
  small:
  - {devices: all, device-filter: "0x20B010DE", mig-enabled: true,
     mig-devices: {1g.5gb: 4, 3g.20gb: 1}}
  first-only:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  too-much:
  - {devices: all, device-filter: ["0x20B010DE"], mig-enabled: true, mig-devices: {4g.20gb: 2}}
  pair:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 5, 2g.10gb: 1}}
  everywhere:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
"""
DOCUMENT = config.parse(LAYOUTS, source="layouts.yaml")


def layout(name: str) -> layouts.Layout:
    return DOCUMENT.layout(name)


def has(rig: LocalRig, name: str, *, is_mode_only: bool = False) -> bool:
    return plans.plan(rig.deps.gpus.observe(), layout(name), is_mode_only=is_mode_only).is_applied


def with_layout(name: str, *, count: int = 2) -> LocalRig:
    rig = LocalRig("off", count=count)
    rig.apply(layout(name))
    return rig


def drawn(planned: plans.Planned, *, is_wide: bool = False) -> str:
    return gpu_text.plan(planned, is_wide=is_wide, style=bar.Style())


def test_apply_changes_only_what_differs() -> None:
    rig = LocalRig("off")

    first = rig.apply(layout("balanced"))
    done = rig.steps
    again = rig.apply(layout("balanced"))

    assert (first.is_changed, again.is_changed, rig.steps) == (True, False, done)
    assert has(rig, "balanced")
    assert [len(gpu.gpu_instances) for gpu in rig.gpus] == [4, 4]
    (planned,) = rig.apply(layout("small")).rounds
    assert gpu_text.summary(planned) == "2 instances destroyed, 4 created, 6 kept; no reset"


def test_mode_only_switches_mig_and_leaves_instances_alone() -> None:
    rig, full = LocalRig("off"), with_layout("balanced")

    applied = rig.apply(layout("balanced"), is_mode_only=True)
    full.apply(layout("small"), is_mode_only=True)

    assert applied.layout == "balanced"
    assert rig.verified_layout.config == "balanced (MIG mode only)"
    assert full.verified_layout.config == "small (MIG mode only)"
    assert [gpu.current_mode for gpu in rig.gpus] == [model.MigMode.ENABLED] * 2
    assert [gpu.gpu_instances for gpu in rig.gpus] == [(), ()]
    assert has(rig, "balanced", is_mode_only=True)
    assert not has(rig, "balanced")
    assert has(full, "balanced")


def usage_of(devices: Mapping[str, Iterable[str]]) -> gpu_use.Usage:
    return gpu_use.Usage(
        pods=(),
        assigned=tuple(
            pod_object.PodDevices(namespace="team", name=name, device_ids=frozenset(ids))
            for name, ids in devices.items()
        ),
    )


def test_a_plan_destroys_the_devices_of_the_fewest_pods() -> None:
    rig = with_layout("everywhere", count=1)
    uuids = dict(enumerate(rig.gpus[0].mig_uuids))
    train = [uuids.pop(place) for place in (2, 3)]
    usage = usage_of({"train": train, **{f"pod-{i}": [uuid] for i, uuid in uuids.items()}})

    planned = plans.plan(rig.deps.gpus.observe(), layout("pair"), usage=lambda: usage)

    assert planned.evicted == ("team/train",)


def test_a_plan_names_the_pods_or_devices_that_it_ends() -> None:
    rig = with_layout("balanced", count=1)
    by_profile = {str(gi.profile): gi for gi in rig.gpus[0].gpu_instances}
    uuids = {name: gi.compute_instances[0].uuid or "" for name, gi in by_profile.items()}
    usage = usage_of({"train-0": [uuids["2g.10gb"]], "serve-0": [uuids["3g.20gb"]]})

    planned = plans.plan(rig.deps.gpus.observe(), layout("small"), usage=lambda: usage)
    unknown = drawn(plans.plan(rig.deps.gpus.observe(), layout("small")))
    every = plans.plan(with_layout("balanced", count=4).deps.gpus.observe(), layout("small"))

    assert planned.evicted == ("team/train-0",)
    assert "Pods that would be evicted: team/train-0" in drawn(planned)
    assert planned.plan.destroyed_uuids == {uuids["2g.10gb"]}
    assert f"MIG devices that must be idle: {uuids['2g.10gb']}" in unknown
    assert unknown.endswith("Layout small: 1 instance destroyed, 2 created, 3 kept; no reset.")
    assert "4 MIG devices must be idle; '-o json' lists them." in drawn(every)


def test_plan_names_gpus_that_must_be_idle_for_a_mode() -> None:
    mode = drawn(plans.plan(LocalRig("off").deps.gpus.observe(), layout("balanced")))
    active = with_layout("balanced").deps.gpus.observe()
    nothing = drawn(plans.plan(active, layout("balanced")), is_wide=True)

    assert "GPU 0-1 must be idle." in mode
    assert mode.endswith("MIG mode of 2 GPUs changed; 2 GPUs reset.")
    assert nothing.endswith("Layout balanced is already active: nothing to do.")


def test_a_failed_check_says_how_a_gpu_differs() -> None:
    checked = plans.plan(with_layout("balanced").deps.gpus.observe(), layout("small"))

    assert not checked.is_applied
    assert gpu_text.difference(checked) == (
        "GPU 0: 1x 3g.20gb, 1x 2g.10gb, 2x 1g.5gb; the layout has 1x 3g.20gb, 4x 1g.5gb; "
        "1 more GPU differs"
    )


def test_plan_and_status_as_data_list_steps_and_instances() -> None:
    planned = plans.plan(LocalRig("off").deps.gpus.observe(), layout("first-only")).to_data()
    rig = with_layout("first-only")
    shown = gpu_answers.status(rig.deps.gpus.observe(), None)

    assert planned["instances"] == {"destroyed": 0, "created": 1, "kept": 0}
    assert isinstance(planned["gpus"], list)
    assert [step["action"] for step in planned["gpus"][0]["steps"]] == [
        "set-mode",
        "create-gpu-instance",
        "create-compute-instance",
    ]
    assert isinstance(shown["gpus"], list)
    gpu = shown["gpus"][0]
    assert (gpu["mig_mode"], gpu["pci_device_id"]) == ("enabled", "0x20B010DE")
    assert [(gi["profile"], gi["placement"]) for gi in gpu["gpu_instances"]] == [
        ("7g.40gb", "0:8")
    ]
    assert rig.gpus[1] == hardware.template(A100, 1)


def test_products_that_share_a_name_are_reported_apart() -> None:
    templates = [hardware.template(product) for product in hardware.match("h100-*gb")]
    names = [template.name for template in templates]
    assert len(set(names)) < len(names)

    result = layout_fit.against_products([layout("balanced")], source="f", templates=templates)

    assert len(result.product_fits) == len(templates)


def test_facts_that_need_mig_mode_are_unknown_before_it_is_on() -> None:
    gpu = dataclasses.replace(hardware.template(A100), profiles=None)

    result = layout_fit.against_node([layout("balanced")], source="f", gpus=[gpu])

    assert result.product_fits["balanced", A100.name].fit is layout_fit.Fit.UNKNOWN
    assert not result.misfits
