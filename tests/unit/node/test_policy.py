"""The owner's decisions, and how they are written down."""

import pytest

from mig_manager.core.node import policies


def test_each_layout_has_its_plugin_config_and_the_star_is_for_the_others() -> None:
    configs = policies.parse_plugin_configs(" all-1g.5gb=sliced, *=whole ,")
    decided = policies.Policy(plugin_configs=configs)

    assert decided.plugin_config("all-1g.5gb") == "sliced"
    assert decided.plugin_config("all-7g.40gb") == "whole"


def test_without_a_star_the_label_of_other_layouts_is_left_alone() -> None:
    assert policies.Policy(plugin_configs=(("a", "b"),)).plugin_config("c") is None
    assert policies.parse_plugin_configs("") == ()


@pytest.mark.parametrize(
    "text", ["a", "a=", "=b", "a=b c", "a=b=c", "a=-b", "a=" + "b" * 64, "a=b,a=c"]
)
def test_an_invalid_map_of_plugin_configs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"LAYOUT=CONFIG|twice") as refused:
        policies.parse_plugin_configs(text)
    # The option's error begins with the whole text.
    assert "," in text or repr(text) not in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        "mig-not-ready",
        "example.com/mig-not-ready",
        "startup-taint.cluster-autoscaler.kubernetes.io/mig",
        " a.b/c ",
    ],
)
def test_a_startup_taint_may_have_any_key_of_the_owner(key: str) -> None:
    assert policies.parse_startup_taint(key) == key.strip()


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "is not the key"),
        ("a/b/c", "is not the key"),
        ("a=b:NoSchedule", "is not the key"),
        ("Example.com/a", "is not the key"),
        ("a" * 64, "is not the key"),
        ("mig-manager.io/reconfiguring", "agent's own"),
        ("node.kubernetes.io/not-ready", "of Kubernetes"),
        ("node.cloudprovider.kubernetes.io/uninitialized", "of Kubernetes"),
        ("readiness.k8s.io/mig", "of Kubernetes"),
    ],
)
def test_an_invalid_key_or_a_controllers_taint_is_no_startup_taint(key: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        policies.parse_startup_taint(key)
