"""The table of the daemons that a cluster owner names as GPU clients."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core.node.daemons import client_table
from tests.rigs.node.samples import pod

TABLE = """\
version: v1
clients:
- labels: {app: watcher}
- labels: {app: sampler, tier: gpu}
  namespace: monitoring
  deploy-label: nvidia.com/gpu.deploy.sampler
"""


def test_client_table_matches_all_labels_and_the_namespace() -> None:
    anywhere, in_place = table = client_table.parse(TABLE, source="t")
    assert table == (
        client_table.ExtraClient(labels={"app": "watcher"}),
        client_table.ExtraClient(
            labels={"app": "sampler", "tier": "gpu"},
            namespace="monitoring",
            deploy_label="nvidia.com/gpu.deploy.sampler",
        ),
    )
    sampler: dict[str, Any] = {
        "namespace": "monitoring",
        "labels": {"app": "sampler", "tier": "gpu", "more": "x"},
    }
    assert client_table.members([pod(**sampler)], table) == (pod(**sampler),)
    assert not anywhere.matches(pod(**sampler))
    assert not in_place.matches(pod(**sampler | {"namespace": "default"}))
    assert not in_place.matches(pod(**sampler | {"labels": {"app": "sampler"}}))


@pytest.mark.parametrize("text", ["", "null", "version: v1", "version: v1\nclients:\n"])
def test_an_empty_table_has_no_daemons(text: str) -> None:
    assert client_table.parse(text, source="t") == ()


ENTRY = "version: v1\nclients:\n- labels: {a: b}\n  "


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("[]", "1:1", "expected a mapping"),
        ("clients: []", "1:1", "'version' is missing"),
        ("version: v2", "1:10", "must be the text v1"),
        ("version: v1\nclient: []", "2:1", "did you mean 'clients'"),
        ("version: v1\nclients: {}", "2:10", "must be a list"),
        ("version: v1\nclients:\n- x", "3:3", "a client is a mapping"),
        ("version: v1\nclients:\n- namespace: x", "3:3", "'labels' is missing"),
        ("version: v1\nclients:\n- labels: {}", "3:11", "labels must be a mapping"),
        ("version: v1\nclients:\n- labels: {a: true}", "3:15", "label 'a' must be a text"),
        (f"{ENTRY}namespace: 1", "4:14", "namespace must be"),
        (f"{ENTRY}deploy-label: example.com/x", "4:17", "begin with 'nvidia.com/gpu.deploy.'"),
        (f"{ENTRY}deploy-label: nvidia.com/gpu.deploy.", "4:17", "must begin with"),
    ],
)
def test_a_malformed_table_is_refused_with_its_location(
    text: str, place: str, message: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        client_table.parse(text, source="t.yaml")
    assert caught.value.message.startswith(f"t.yaml:{place}: ")
    assert message in caught.value.message
