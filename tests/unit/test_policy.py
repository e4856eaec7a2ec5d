"""The owner's decisions, and how they are written down."""

import pytest

from mig_manager import errors
from mig_manager.core.node import policy


def test_each_layout_has_its_plugin_config_and_the_star_is_for_the_others() -> None:
    configs = policy.parse_plugin_configs(" all-1g.5gb=sliced, *=whole ,", origin="--x")
    decided = policy.Policy(plugin_configs=configs)

    assert decided.plugin_config("all-1g.5gb") == "sliced"
    assert decided.plugin_config("all-7g.40gb") == "whole"


def test_without_a_star_the_label_of_other_layouts_is_left_alone() -> None:
    assert policy.Policy(plugin_configs={"a": "b"}).plugin_config("c") is None
    assert policy.parse_plugin_configs("", origin="--x") == {}


@pytest.mark.parametrize(
    "text", ["a", "a=", "=b", "a=b c", "a=b=c", "a=-b", "a=" + "b" * 64, "a=b,a=c"]
)
def test_an_invalid_map_is_refused_with_its_origin(text: str) -> None:
    with pytest.raises(errors.UsageError, match="--x: "):
        policy.parse_plugin_configs(text, origin="--x")
