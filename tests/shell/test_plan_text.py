"""What ``plan``, ``assert`` and ``status`` show of GPUs in memory."""

from collections.abc import Iterable, Mapping

from mig_manager.catalogue import hardware
from mig_manager.cli.toolkit import gpu_text
from mig_manager.core.answers import gpu_answers
from mig_manager.core.display import styles
from mig_manager.core.layout import layout_parser, layouts, plans
from mig_manager.core.node import gpu_use
from mig_manager.core.objects import pod_object
from tests.rigs import layout_table
from tests.rigs.node.local_rig import LocalRig

DOCUMENT = layout_parser.parse(
    layout_table.document(("all-balanced", "one-slice", "all-1g.5gb"))
    + """\
  first-only:
  - {devices: [0], mig-enabled: true, mig-devices: {7g.40gb: 1}}
  pair:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 5, 2g.10gb: 1}}
""",
    source="layouts.yaml",
)


def layout(name: str) -> layouts.Layout:
    return DOCUMENT.layout(name)


def with_layout(name: str, *, count: int = 2) -> LocalRig:
    rig = LocalRig("off", count=count)
    rig.apply(layout(name))
    return rig


def drawn(planned: plans.Planned, *, is_wide: bool = False) -> str:
    return gpu_text.plan(planned, is_wide=is_wide, style=styles.Style())


def usage_of(devices: Mapping[str, Iterable[str]]) -> gpu_use.Usage:
    return gpu_use.Usage(
        pods=(),
        assigned=tuple(
            pod_object.PodDevices(namespace="team", name=name, device_ids=frozenset(ids))
            for name, ids in devices.items()
        ),
    )


def test_a_plan_destroys_the_devices_of_the_fewest_pods() -> None:
    rig = with_layout("all-1g.5gb", count=1)
    uuids = dict(enumerate(rig.gpus[0].mig_uuids))
    train = [uuids.pop(place) for place in (2, 3)]
    usage = usage_of({"train": train, **{f"pod-{i}": [uuid] for i, uuid in uuids.items()}})

    planned = plans.plan(rig.deps.gpus.observe(), layout("pair"), usage=lambda: usage)

    assert planned.affected_pods == ("team/train",)


def test_a_plan_names_the_pods_or_devices_that_it_ends() -> None:
    rig = with_layout("all-balanced", count=1)
    by_profile = {str(gi.profile): gi for gi in rig.gpus[0].gpu_instances}
    uuids = {name: gi.compute_instances[0].uuid or "" for name, gi in by_profile.items()}
    usage = usage_of({"train-0": [uuids["2g.10gb"]], "serve-0": [uuids["3g.20gb"]]})

    planned = plans.plan(rig.deps.gpus.observe(), layout("one-slice"), usage=lambda: usage)
    unknown = drawn(plans.plan(rig.deps.gpus.observe(), layout("one-slice")))
    every = plans.plan(
        with_layout("all-balanced", count=4).deps.gpus.observe(), layout("one-slice")
    )

    assert planned.affected_pods == ("team/train-0",)
    assert "Affected pods: team/train-0" in drawn(planned)
    assert planned.plan.destroyed_uuids == {uuids["2g.10gb"]}
    assert f"MIG devices that must be idle: {uuids['2g.10gb']}" in unknown
    assert unknown.endswith("Layout one-slice: 1 instance destroyed, 2 created, 3 kept; no reset.")
    assert "4 MIG devices must be idle; '-o json' lists them." in drawn(every)


def test_plan_names_gpus_that_must_be_idle_for_a_mode() -> None:
    mode = drawn(plans.plan(LocalRig("off").deps.gpus.observe(), layout("all-balanced")))
    active = with_layout("all-balanced").deps.gpus.observe()
    nothing = drawn(plans.plan(active, layout("all-balanced")), is_wide=True)

    assert "GPU 0-1 must be idle." in mode
    assert mode.endswith("MIG mode of 2 GPUs changed; 2 GPUs reset.")
    assert nothing.endswith("Layout all-balanced is already active: nothing to do.")


def test_a_plan_of_the_mode_alone_calls_gpus_in_it_unchanged() -> None:
    active = with_layout("all-balanced").deps.gpus.observe()

    first, second = drawn(plans.plan(active, layout("first-only"), is_mode_only=True)).split(
        "\n\n"
    )[:2]

    assert " · unchanged · " in first
    assert " · not in this layout · " in second


def test_a_failed_check_says_how_a_gpu_differs() -> None:
    checked = plans.plan(with_layout("all-balanced").deps.gpus.observe(), layout("one-slice"))

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
    assert rig.gpus[1] == hardware.template(hardware.find("A100-SXM4-40GB"), 1)
