"""The table of the owner's own daemons."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core.node import clients
from tests.unit import test_clients

TABLE = """\
version: v1
clients:
- labels: {app: watcher}
- labels: {app: sampler, tier: gpu}
  namespace: monitoring
  deploy-label: nvidia.com/gpu.deploy.sampler
"""


def test_a_table_reads_as_it_is_documented() -> None:
    assert clients.parse(TABLE, source="t") == (
        clients.ExtraClient(labels={"app": "watcher"}),
        clients.ExtraClient(
            labels={"app": "sampler", "tier": "gpu"},
            namespace="monitoring",
            deploy_label="nvidia.com/gpu.deploy.sampler",
        ),
    )


@pytest.mark.parametrize("text", ["", "null", "version: v1", "version: v1\nclients:\n"])
def test_an_empty_table_has_no_daemons(text: str) -> None:
    assert clients.parse(text, source="t") == ()


def test_a_daemons_pods_have_all_of_its_labels_and_are_in_its_namespace() -> None:
    anywhere, in_place = clients.parse(TABLE, source="t")
    labels = {"app": "sampler", "tier": "gpu", "more": "x"}
    pod = dataclasses.replace(test_clients.POD, namespace="monitoring", labels=labels)

    assert in_place.matches(pod)
    assert not anywhere.matches(pod)
    assert not in_place.matches(dataclasses.replace(pod, namespace="default"))
    assert not in_place.matches(dataclasses.replace(pod, labels={"app": "sampler"}))
    assert clients.members([pod], (anywhere, in_place)) == (pod,)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[]", "1:1", "expected a mapping"),
        ("clients: []", "1:1", "'version' is missing"),
        ("version: v2", "1:10", "must be the text v1"),
        ("version: 1", "1:10", "must be the text v1"),
        ("version: v1\nclient: []", "2:1", "did you mean 'clients'"),
        ("version: v1\nclients: {}", "2:10", "must be a list"),
        ("version: v1\nclients:\n- x", "3:3", "a client is a mapping"),
        ("version: v1\nclients:\n- namespace: x", "3:3", "'labels' is missing"),
        ("version: v1\nclients:\n- labels: {}", "3:11", "labels must be a mapping"),
        ("version: v1\nclients:\n- labels: {a: true}", "3:15", "label 'a' must be a text"),
        ("version: v1\nclients:\n- labels: {a: b}\n  namespace: 1", "4:14", "namespace must be"),
        (
            "version: v1\nclients:\n- labels: {a: b}\n  deploy-label: example.com/x",
            "4:17",
            "must begin with 'nvidia.com/gpu.deploy.'",
        ),
        (
            "version: v1\nclients:\n- labels: {a: b}\n  deploy-label: nvidia.com/gpu.deploy.",
            "4:17",
            "must begin with",
        ),
    ],
)
def test_a_malformed_table_is_refused_with_its_location(
    text: str, place: str, message: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        clients.parse(text, source="t.yaml")

    assert caught.value.message.startswith(f"t.yaml:{place}: ")
    assert message in caught.value.message
