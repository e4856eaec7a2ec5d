"""When many things are one: after a quiet while, or when they do not stop."""

from mig_manager.core import timing


def new() -> timing.Burst:
    return timing.Burst(quiet_s=0.5, longest_s=5.0)


def test_nothing_is_due_before_anything_has_happened() -> None:
    assert new().ends_in_s(1000.0) is None


def test_a_burst_is_over_after_a_quiet_while() -> None:
    changes = new()
    changes.add(10.0)
    changes.add(10.25)
    assert changes.ends_in_s(10.25) == 0.5
    assert changes.ends_in_s(10.5) == 0.25
    assert changes.ends_in_s(11.0) == 0.0


def test_a_burst_that_does_not_stop_is_over_after_its_longest_time() -> None:
    changes = new()
    for tenth in range(100, 150):
        changes.add(tenth / 10)
    assert changes.ends_in_s(14.9) is not None
    assert 0.0 < (changes.ends_in_s(14.9) or 0.0) < 0.2
    assert changes.ends_in_s(15.0) == 0.0


def test_what_comes_after_a_burst_is_another() -> None:
    changes = new()
    changes.add(10.0)
    changes.clear()
    assert changes.ends_in_s(20.0) is None
    changes.add(30.0)
    assert changes.ends_in_s(30.0) == 0.5
