"""The agent's loop over a pipeline in memory; the whole process is tried in tests/e2e."""

import threading
from collections.abc import Callable

from mig_manager import agent, errors, mailbox, ports, record
from mig_manager.core import model


def outcome(reason: errors.Reason) -> record.Outcome:
    is_good = reason is errors.Reason.APPLIED
    state = model.State.SUCCESS if is_good else model.State.FAILED
    return record.Outcome(state=state, reason=reason, message="")


class Pipeline:
    """Answers each run from a script; stops the agent after the last answer."""

    def __init__(self, box: mailbox.Mailbox, *script: errors.Reason | Exception) -> None:
        self._box = box
        self._script = list(script)
        self.runs: list[tuple[str, int]] = []
        self.recovered = 0
        self.has_rested = threading.Event()
        self.on_run: Callable[[], None] = lambda: None

    def recover(self) -> None:
        self.recovered += 1

    def rest(self) -> None:
        self.has_rested.set()

    def run(self, name: str, wish: ports.Wish, *, attempt: int = 1) -> record.Outcome:
        self.runs.append((name, attempt))
        self.on_run()
        answer = self._script.pop(0)
        if not self._script:
            self._box.stop()
        if isinstance(answer, Exception):
            raise answer
        return outcome(answer)


def serve(box: mailbox.Mailbox, pipeline: Pipeline) -> None:
    served = agent.Agent(pipeline, box, retry_initial_s=0.01, retry_max_s=0.02)
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_a_transient_failure_is_tried_again_until_it_succeeds() -> None:
    box = mailbox.Mailbox()
    box.put_label("a")
    pipeline = Pipeline(
        box, errors.Reason.IN_USE, errors.Reason.DRIVER_NOT_LOADED, errors.Reason.APPLIED
    )

    serve(box, pipeline)

    assert pipeline.runs == [("a", 1), ("a", 2), ("a", 3)]
    assert pipeline.recovered == 1


def test_a_permanent_failure_waits_for_another_wish() -> None:
    box = mailbox.Mailbox()
    box.put_label("a")
    pipeline = Pipeline(box, errors.Reason.DOES_NOT_FIT, errors.Reason.APPLIED)
    pipeline.on_run = lambda: box.put_label("b")

    serve(box, pipeline)

    assert pipeline.runs == [("a", 1), ("b", 1)]


def test_an_api_that_does_not_answer_is_recovered_from_before_the_next_try() -> None:
    box = mailbox.Mailbox()
    box.put_label("a")
    lost = errors.ClusterError("down", reason=errors.Reason.API_UNAVAILABLE)
    pipeline = Pipeline(box, lost, errors.Reason.APPLIED)

    serve(box, pipeline)

    assert pipeline.runs == [("a", 1), ("a", 2)]
    assert pipeline.recovered == 2


def test_a_newer_wish_interrupts_the_pause_before_a_retry() -> None:
    box = mailbox.Mailbox()
    box.put_label("a")
    pipeline = Pipeline(box, errors.Reason.IN_USE, errors.Reason.APPLIED)
    served = agent.Agent(pipeline, box, retry_initial_s=600, retry_max_s=600)
    thread = threading.Thread(target=served.serve, daemon=True)
    pipeline.on_run = lambda: threading.Timer(0.05, box.put_label, args=("b",)).start()
    thread.start()
    thread.join(timeout=20)

    assert pipeline.runs == [("a", 1), ("b", 1)]


def test_without_a_label_what_was_left_is_given_back_and_nothing_is_pending() -> None:
    box = mailbox.Mailbox()
    box.put_label(None)
    pipeline = Pipeline(box, errors.Reason.APPLIED)
    thread = threading.Thread(
        target=agent.Agent(pipeline, box, retry_initial_s=1, retry_max_s=1).serve, daemon=True
    )
    thread.start()
    assert pipeline.has_rested.wait(timeout=20)
    box.put_label("a")
    thread.join(timeout=20)

    assert pipeline.runs == [("a", 1)]
    assert pipeline.recovered == 1
