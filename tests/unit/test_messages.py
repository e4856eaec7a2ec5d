"""Messages: short, whole sentences, with their remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import reasons
from mig_manager.agent import outcomes
from mig_manager.core import messages


def test_a_few_of_many_are_named_and_a_shared_cause_is_mentioned_once() -> None:
    assert messages.list_names(["a", "b"]) == "a, b"
    assert messages.list_names([f"p{n}" for n in range(7)]) == "p0, p1, p2, p3, p4 and 2 more"
    assert messages.by_cause([("a", "x"), ("b", "y"), ("c", "x")]) == "a, c (x); b (y)"
    assert messages.by_cause([("a", ""), ("b", "y"), ("c", "")]) == "a, c; b (y)"
    many = [(f"p{n}", f"x{n // 2}") for n in range(14)]
    assert messages.by_cause(many).endswith("p8, p9 (x4); 4 more")


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        ("It failed. " + "why " * 99, 40, "It failed. why why why why why why ..."),
        ("one. two.", 9, "one. two."),
        ("x" * 5000, 1024, "x" * 1020 + " ..."),
        ("äöü " * 99 + "end. Raise the timeout.", 40, "äöü äöü ... Raise the timeout."),
        ("long " * 99 + "Is it up? Read the log.", 40, "long long long long ... Read the log."),
    ],
)
def test_long_message_is_cut_at_a_word_and_keeps_its_last_sentence(
    text: str, limit: int, cut: str
) -> None:
    assert messages.fit(text, limit) == cut
    assert len(cut.encode()) <= limit


@given(
    reason=st.sampled_from([reason for reason in reasons.Reason if reason.remedy]),
    message=st.text(max_size=40).map(lambda text: f"{text} " * 150) | st.text(),
    end=st.sampled_from(["", ".", "?", "!"]),
)
def test_an_event_of_any_failure_is_short_and_ends_with_the_remedy(
    reason: reasons.Reason, message: str, end: str
) -> None:
    published = outcomes.failure(reason, message + end).message
    event = messages.fit(published, messages.MAX_EVENT_BYTES)

    assert len(event.encode()) <= 1024
    assert event.endswith(reason.remedy)


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        (reasons.Reason.DRAIN_TIMEOUT, "--drain-timeout-s"),
        (reasons.Reason.DOES_NOT_FIT, "'kubectl mig layouts NODE'"),
        (reasons.Reason.UNKNOWN_PROFILE, "'kubectl mig layouts NODE'"),
        (reasons.Reason.NO_GPU_MATCHES, "'kubectl mig layouts NODE'"),
    ],
)
def test_a_remedy_on_a_node_names_an_option_or_a_cluster_command(
    reason: reasons.Reason, named: str
) -> None:
    assert named in outcomes.failure(reason, "x").message
    assert "mig-manager" not in reason.remedy


def test_a_sentence_that_has_an_end_mark_gets_no_other() -> None:
    reason = reasons.Reason.UNKNOWN_CONFIG

    assert [messages.with_full_stop(text) for text in ("a", "a.", "a?", "a!")] == [
        "a.",
        "a.",
        "a?",
        "a!",
    ]
    assert messages.join("a", "", "b?", "c.", "d") == "a; b? c. d"
    assert (
        outcomes.failure(reason, "did you mean 'x'?").message
        == f"did you mean 'x'? {reason.remedy}"
    )
