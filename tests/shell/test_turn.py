"""Waiting for the node's lock."""

import pytest

from mig_manager import errors
from mig_manager.change import transaction
from mig_manager.core import timing
from tests import fakes
from tests.shell import applying_rig

EVEN = timing.Backoff(first_s=1.0, max_s=1.0)


def test_a_free_lock_is_taken_at_once_and_released() -> None:
    clock, lock = fakes.FakeClock(), applying_rig.FakeExclusion()

    with transaction.locked(lock, "x", clock=clock, wait=clock.wait, timeout_s=0.0):
        assert lock.is_locked

    assert not lock.is_locked
    assert clock.now_s == 0
    assert lock.descriptions == ["x"]


def test_a_lock_is_tried_again_until_it_is_free_and_the_wait_is_reported_once() -> None:
    clock, lock = fakes.FakeClock(), applying_rig.FakeExclusion(refusals=3)
    refusals: list[errors.LockedError] = []

    with transaction.locked(
        lock,
        "x",
        clock=clock,
        wait=clock.wait,
        timeout_s=9.0,
        backoff=EVEN,
        on_wait=refusals.append,
    ):
        assert lock.is_locked

    assert clock.now_s == 3
    assert [error.owner for error in refusals] == ["agent"]


def test_the_wait_ends_at_its_deadline_and_says_how_long_it_was() -> None:
    clock, lock = fakes.FakeClock(), applying_rig.FakeExclusion(refusals=99)

    with (
        pytest.raises(errors.LockedError) as caught,
        transaction.locked(lock, "x", clock=clock, wait=clock.wait, timeout_s=2.5, backoff=EVEN),
    ):
        pass

    assert clock.now_s == pytest.approx(2.5)
    assert caught.value.message == (
        "another manager is at work: agent; waited 2.5 s for it to finish"
    )


def test_without_a_wait_a_taken_lock_is_an_error_at_once() -> None:
    clock, lock = fakes.FakeClock(), applying_rig.FakeExclusion(refusals=1)

    with (
        pytest.raises(errors.LockedError, match=r"agent$"),
        transaction.locked(lock, "x", clock=clock, wait=clock.wait, timeout_s=0.0),
    ):
        pass

    assert clock.now_s == 0


def test_a_request_that_ends_ends_the_wait() -> None:
    clock, lock = fakes.FakeClock(), applying_rig.FakeExclusion(refusals=99)
    request = fakes.FakeRequest(clock, ends_at=2, replaced=True)

    with (
        pytest.raises(errors.Superseded),
        transaction.locked(
            lock, "x", clock=clock, wait=request.wait, timeout_s=99.0, backoff=EVEN
        ),
    ):
        pass

    assert clock.now_s == 2


def test_a_lock_that_the_work_itself_meets_is_not_waited_for() -> None:
    clock, lock = fakes.FakeClock(), applying_rig.FakeExclusion()

    with (
        pytest.raises(errors.LockedError, match=r"^mine$"),
        transaction.locked(lock, "x", clock=clock, wait=clock.wait, timeout_s=9.0),
    ):
        raise errors.LockedError("mine")

    assert clock.now_s == 0
