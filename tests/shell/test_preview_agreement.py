"""``rollout --dry-run`` and ``kubectl mig plan`` agree on what a node can have."""

import dataclasses
import json
import pathlib

import pytest

from mig_manager.cli import main
from mig_manager.core import model
from testkit import apiserver
from tests.shell import plugin_rig as rig

DOCUMENT = """
version: v1
mig-configs:
  fits: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]
  active: [{devices: all, mig-enabled: false}]
  too-many: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 9}}]
  no-such-profile: [{devices: all, mig-enabled: true, mig-devices: {1g.99gb: 1}}]
  other-gpu: [{device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {}}]
"""
IDLE = rig.gpus("2xA100-SXM4-40GB")
# Such a driver lists profiles only with MIG on, and so whether they fit is not known before.
BLIND = tuple(dataclasses.replace(gpu, profiles=None) for gpu in IDLE)


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (
            IDLE,
            {
                "fits": True,
                "active": True,
                "too-many": False,
                "no-such-profile": False,
                "other-gpu": False,
            },
        ),
        (BLIND, {"fits": None, "active": True, "too-many": None, "no-such-profile": None}),
    ],
    ids=["known profiles", "unknown profiles"],
)
def test_both_previews_give_the_same_verdict(
    tmp_path: pathlib.Path, published: tuple[model.Gpu, ...], expected: dict[str, bool | None]
) -> None:
    file = tmp_path / "layouts.yaml"
    file.write_text(DOCUMENT)
    with apiserver.serve() as server:
        server.store.create(rig.node("gpu-1", gpus=published, labels={"pool": "a"}))
        viewer = rig.viewer(server, tmp_path)
        kubeconfig = ("--kubeconfig", str(tmp_path / "kubeconfig"))
        for layout, fits in expected.items():
            words = (layout, "-l", "pool=a", "-f", str(file), "-o", "json")
            planned = viewer.alone("plan", *words)
            rolled = viewer.alone("rollout", *words, "--dry-run", *kubeconfig, command=main.main)

            (plan,), (preview,) = json.loads(planned.out)["nodes"], json.loads(rolled.out)["nodes"]
            verdicts = {True: {"fits", "applied"}, False: {"does-not-fit"}, None: {"unknown"}}
            assert plan["fits"] is fits
            assert preview["verdict"] in verdicts[fits]
            assert planned.status == rolled.status == (0 if fits else 1)
            assert (plan["why_not"] or "") == (preview["message"] if fits is False else "")


def test_content_that_only_the_agent_has_is_unknown(tmp_path: pathlib.Path) -> None:
    listed = {"night": {"hash": "0123456789ab", "origin": "config.yaml:3"}}
    node = rig.node("gpu-1", gpus=IDLE)
    node["metadata"]["annotations"]["mig-manager.io/layouts"] = json.dumps(
        {"version": 1, "layouts": listed}
    )
    other = DOCUMENT.replace("fits:", "night:")
    with apiserver.serve() as server:
        server.store.create(node)
        viewer = rig.viewer(server, tmp_path)
        kubeconfig = ("--kubeconfig", str(tmp_path / "kubeconfig"))
        words = ("night", "-l", "nvidia.com/gpu.present", "-o", "json")

        planned = [viewer.alone("plan", *words)]
        rolled = viewer.alone("rollout", *words, "--dry-run", *kubeconfig, command=main.main)
        data = {"config.yaml": other}
        server.store.create(rig.config_map("mig-manager", "mig-manager-config", **data))
        planned.append(viewer.alone("plan", *words))
        chosen = viewer.alone("plan", *words, "-f", "-", stdin=other)

    assert [each.status for each in (*planned, rolled)] == [1, 1, 1]
    verdicts = [json.loads(each.out)["nodes"][0] for each in (*planned, rolled, chosen)]
    assert [each["fits"] for each in verdicts[:2]] == [None, None]
    assert verdicts[0]["why_not"] == verdicts[1]["why_not"] == verdicts[2]["message"]
    assert (verdicts[2]["verdict"], verdicts[2]["reason"]) == ("unknown", "ContentUnknown")
    assert (chosen.status, verdicts[3]["fits"]) == (0, True)
    assert verdicts[3]["notes"] == ["its agent has another layout named night"]
