"""Messages that stay short whatever they are about."""

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import messages


def test_a_few_of_many_are_named_and_the_others_counted() -> None:
    assert messages.listed(["a", "b"]) == "a, b"
    assert (
        messages.listed([f"p{number}" for number in range(7)]) == "p0, p1, p2, p3, p4 and 2 more"
    )


def test_a_shared_cause_is_mentioned_once() -> None:
    message = messages.by_cause([("a", "x"), ("b", "y"), ("c", "x")])

    assert message == "a, c (x), b (y)"


def test_a_message_that_fits_stays_as_it_is() -> None:
    assert messages.fit("one. two.", 9) == "one. two."


def test_a_message_is_cut_at_a_word_by_its_bytes_and_keeps_its_last_sentence() -> None:
    message = messages.fit("äöü " * 1000 + "end. Raise the timeout.", 200)

    assert len(message.encode()) <= 200
    assert message.startswith("äöü äöü")
    assert message.endswith("äöü ... Raise the timeout.")


def test_a_message_without_words_or_sentences_is_cut_all_the_same() -> None:
    assert messages.fit("x" * 5000, 1024) == "x" * 1020 + " ..."


def test_a_failure_that_names_everything_is_bounded_and_keeps_its_remedy() -> None:
    remedy = errors.Reason.DRAIN_TIMEOUT.remedy

    message = outcomes.failed(errors.Reason.DRAIN_TIMEOUT, "a-long-word " * 20_000).message

    assert len(message.encode()) <= messages.LONGEST_BYTES
    assert message.endswith(remedy)
