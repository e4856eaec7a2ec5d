"""How a page's sessions are compared with what the programs write: to the character."""

import pytest

from tests.docs import pages

_NODES = """\
NAME      STATUS   ROLES    AGE   VERSION   APPLIED
sandbox   Ready    <none>   15s   v1.34.0   all-balanced
"""
_WIDER = """\
NAME      STATUS   ROLES    AGE     VERSION   APPLIED
sandbox   Ready    <none>   2m15s   v1.34.0   all-balanced
"""
_PODS = "NAME    READY   STATUS    RESTARTS   AGE\ntrain   1/1     Running   0          {}\n"
_FOLDER = "/tmp/mig"  # noqa: S108 - not used here
_OF_OTHER_KUBECTLS = "the namespace that newer versions of kubectl name"


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        (_NODES, _NODES),
        (_NODES, _WIDER),
        (_PODS.format("4s"), _PODS.format("12m")),
        (f"{_FOLDER}-…/config.yaml:71", f"{_FOLDER}-1ud8x1p6/config.yaml:71"),
        (
            "simulated, in ~/.local/state/mig-manager/a.json",
            "simulated, in /home/me/.local/state/mig-manager/a.json",
        ),
        ('budget "a" deleted', 'budget "a" deleted from default namespace'),
        ("", ""),
    ],
)
def test_only_what_a_rule_names_may_differ(shown: str, output: str) -> None:
    assert pages.differences(shown, output) == []


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        (_NODES, _NODES.replace("Ready   ", "Ready,SchedulingDisabled   ")),
        (_NODES, _NODES.replace("v1.34.0", "v1.34.1")),
        (_NODES, _NODES + "other     Ready    <none>   15s   v1.34.0   all-balanced\n"),
        (_NODES, _NODES.replace("   <none>", "    <none>")),
        ("a ... b", "a x b"),
        ("...", ""),
        ("", "a warning\n"),
        (f"{_FOLDER}-…/config.yaml:71", f"{_FOLDER}-1ud8x1p6/config.yaml:72"),
        (f"{_FOLDER}-…/config.yaml", f"{_FOLDER}/config.yaml"),
        ("within 3s of it", "within 4s of it"),
        ('budget "a" deleted', 'budget "b" deleted'),
    ],
)
def test_every_other_difference_counts(shown: str, output: str) -> None:
    assert pages.differences(shown, output)


@pytest.mark.parametrize("rule", pages.RULES, ids=lambda rule: rule.name)
def test_a_rule_is_needed_by_a_page(rule: pages.Rule) -> None:
    shown = "\n".join(
        f"{step.command}\n{step.shown}" for page in pages.SITE for step in pages.steps(page)
    )

    assert rule.pattern.search(shown) or rule.name == _OF_OTHER_KUBECTLS
