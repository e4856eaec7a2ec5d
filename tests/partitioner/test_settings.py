"""The settings of the partitioner."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.cli import registry
from mig_manager.cli.toolkit import parser
from mig_manager.core.objects import selectors
from mig_manager.core.partitioning.decision import decisions
from mig_manager.partitioner import partitioner_settings
from tests.rigs.node import samples


def read(*words: str, **environ: str) -> partitioner_settings.PartitionerSettings:
    return partitioner_settings.PartitionerSettings.read(
        parser.parse(registry.PROGRAM, ["partitioner", *words]), environ
    )


def test_defaults_recommend_on_a_tenth_of_the_opted_in_nodes() -> None:
    options = read()

    assert options.mode is partitioner_settings.Mode.RECOMMEND
    assert options.node_selector == ()
    assert options.limits == decisions.PartitionerLimits(max_unavailable="10%", cooldown_s=None)
    assert (options.lease_namespace, options.lease_name) == (
        "mig-manager",
        "mig-manager-partitioner",
    )


def test_options_and_variables_set_the_limits() -> None:
    options = read(
        *("--mode", "act", "--max-unavailable", "3", "--cooldown-s", "5"),
        *("--reserve", "1g.5gb=2", "--reserve", "3g.20gb=1"),
        *("--base-layout", "all-balanced", "--merge-back-after-s", "600"),
        POD_NAMESPACE="gpus",
    )

    assert options.mode is partitioner_settings.Mode.ACT
    assert options.lease_namespace == "gpus"
    assert options.limits == decisions.PartitionerLimits(
        max_unavailable="3",
        cooldown_s=5.0,
        reserved={samples.profile("1g.5gb"): 2, samples.profile("3g.20gb"): 1},
        merge_back_after_s=600.0,
        prepare_for_s=0.0,
    )
    assert read("--quiet-s", "5", "--longest-wait-s", "5").quiet_s == 5.0
    assert read(MIG_MANAGER_RESERVE="1g.5gb=2,2g.10gb=1").reserved == (
        (samples.profile("1g.5gb"), 2),
        (samples.profile("2g.10gb"), 1),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mode", "perhaps"), "is not one of recommend, act"),
        (("--reserve", "1g.5gb"), "is not PROFILE=COUNT, such as 1g.5gb=2"),
        (("--reserve", "1g.5gb=0"), "is not PROFILE=COUNT"),
        (("--reserve", "small=1"), "is not PROFILE=COUNT: "),
        (("--reserve", "1g.5gb=1", "--reserve", "1g.5gb=2"), "names a profile twice"),
        (("--node-selector", "a=("), "is not a label selector"),
        (("--max-unavailable", "0"), "is neither a number of nodes, at least 1, nor a percentage"),
        (("--base-layout", "all-balanced"), "go together"),
        (("--merge-back-after-s", "60"), "go together"),
        (
            ("--base-layout", "a", "--merge-back-after-s", "60", "--prepare-for-s", "15"),
            "--prepare-for-s and --base-layout exclude each other",
        ),
        (("--quiet-s", "20"), "--longest-wait-s must not be less than --quiet-s"),
        (("--lease-duration-s", "10"), "is not a number of seconds from 45"),
        (("--lease-name", "a/b"), "is not the name of an object"),
        (("--replay-days", "2"), "--replay-days needs --replay"),
        (("--scheduler", "packed"), "--scheduler needs --replay"),
        (("--replay-limit-s", "9"), "--replay-limit-s needs --replay"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message.replace("(", r"\(")):
        read(*words)


@pytest.mark.parametrize(
    ("text", "labels", "is_selected"),
    [
        ("", {}, True),
        ("pool=a", {"pool": "a"}, True),
        ("pool == a,zone!=x", {"pool": "a"}, True),
        ("pool=a", {"pool": "b"}, False),
        ("pool=a", {}, False),
        ("pool!=a", {"pool": "a"}, False),
        ("pool in (a, b),!spot", {"pool": "b"}, True),
        ("pool in (a,b),!spot", {"pool": "b", "spot": ""}, False),
        ("example.com/pool notin (a)", {}, True),
        ("example.com/pool notin (a)", {"example.com/pool": "a"}, False),
        ("spot", {"spot": ""}, True),
        ("spot", {}, False),
        ("pool=", {"pool": ""}, True),
        ("gpu.memory>40000", {"gpu.memory": "81559"}, True),
        ("gpu.memory < 40000", {"gpu.memory": "81559"}, False),
    ],
)
def test_a_node_selector_means_the_same_as_in_kubectl(
    text: str,
    labels: dict[str, Any],
    is_selected: bool,  # noqa: FBT001 - a row of the table
) -> None:
    options = selectors.parse_selector(text)

    assert all(each.matches(labels) for each in options) is is_selected


@pytest.mark.parametrize("text", ["=a", "a b", "a=b,", "a!==b", "a in b", "a=(", "in (a)", "!!a"])
def test_an_invalid_node_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a label selector"):
        selectors.parse_selector(text)
