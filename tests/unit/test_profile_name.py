import fractions
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model, profile_name

WELL_FORMED = (
    "1g.5gb", "1c.1g.5gb", "1g.5gb+me", "1c.1g.5gb+me", "1c.2g.10gb", "1g.24gb-me",
    "1g.24gb+me.all", "2g.48gb+gfx", "01g.05gb", "0g.0gb", "0c.0g.0gb", "9c.1g.5gb",
    "10000g.500000gb", "10000c.10000g.500000gb", "1g.5gb+me,you,them", "1c.1g.5gb+me,you,them",
    "1g.5gb+ME", "1g.5gb+foo", "1g.5gb+a..b", "1g.5gb+m2",
)  # fmt: skip

MALFORMED = (
    "", " 1c.1g.5gb", "1 c.1g.5gb", "1c .1g.5gb", "1c. 1g.5gb", "1c.1 g.5gb", "1c.1g .5gb",
    "1c.1g. 5gb", "1c.1g.5 gb", "1c.1g.5g b", "1c.1g.5gb ", "1c . 1g . 5gb", "1g.5gb\n",
    "1c.f1g.5gb", "1r.1g.5gb", "1g.5gbk", "1g.5", "g.5gb", "1g.gb", "c.1g.5gb", "1g.5gb+me,me",
    "1g.5gb-me,me", "1g.5gb+", "1g.5gb-", "1g.5gb+,me", "1g.5gb+me,", "1g.5gb+2me", "1g.5gb+.me",
    "1g.5gb+me.", "1g.5gb+m_e", "1g.5gb+me+gfx", "1g.5gb+me-gfx", "1g.5gb-me+gfx", "1g.5gb*me",
    "1c.1g.5gb*me", "1g.5gb*me,you,them", "1c.1g.5gb*me,you,them", "1g.5gb.me", "+1g.5gb",
    "-1g.5gb", "1_0g.5gb", "\u0661g.5gb", "1G.5gb", "1g.5GB", "9999999999999999999999g.5gb",
    "bogus",
)  # fmt: skip

PROFILES = st.builds(
    lambda compute, extra, memory, attributes, sign: model.Profile(
        compute_slices=compute,
        gpu_slices=compute + extra,
        memory_gb=memory,
        attributes=tuple(sorted(attributes)) if sign else (),
        negated_attributes=() if sign else tuple(sorted(attributes)),
    ),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 999),
    st.sets(st.from_regex(r"[a-zA-Z](\.[a-z0-9])?", fullmatch=True), max_size=3),
    st.booleans(),
)


@pytest.mark.parametrize("text", WELL_FORMED)
def test_well_formed_name_survives_printing_and_parsing(text: str) -> None:
    read = profile_name.parse(text)
    assert profile_name.parse(str(read)) == read


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_name_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"profile"):
        profile_name.parse(text)


def test_a_name_is_parsed_into_its_fields() -> None:
    assert profile_name.parse("1c.2g.10gb+me.all,gfx") == model.Profile(
        compute_slices=1, gpu_slices=2, memory_gb=10, attributes=("gfx", "me.all")
    )
    assert profile_name.parse("2g.48gb-me") == model.Profile(
        compute_slices=2, gpu_slices=2, memory_gb=48, negated_attributes=("me",)
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [("1c.1g.5gb", "1g.5gb"), ("01g.05gb", "1g.5gb"), ("1g.5gb+b,a", "1g.5gb+a,b")],
)
def test_spellings_of_the_same_profile_are_equal(one: str, other: str) -> None:
    assert profile_name.parse(one) == profile_name.parse(other)


@hypothesis.given(PROFILES)
def test_any_profile_survives_being_printed_and_read(profile: model.Profile) -> None:
    assert profile_name.parse(str(profile)) == profile


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("1g.5gb.me", "1g.5gb+me"),
        ("1g.24gb.me.all", "1g.24gb+me.all"),
        ("1G.5GB", "1g.5gb"),
        ("1g. 5gb", "1g.5gb"),
    ],
)
def test_a_common_mistake_is_refused_with_the_right_spelling(slip: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant.replace('+', r'[+]')}'"):
        profile_name.parse(slip)


def test_other_mistakes_are_answered_with_examples() -> None:
    with pytest.raises(ValueError, match=r"'bogus' is not a MIG profile; profiles look like 1g"):
        profile_name.parse("bogus")
    with pytest.raises(ValueError, match=r"xxx\.\.\.") as caught:
        profile_name.parse("x" * 10_000)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("total_mib", "instance_mib", "expected"),
    [
        pytest.param(81559, 9984, 10, id="H100 1g"),
        pytest.param(81559, 81152, 80, id="H100 7g"),
        pytest.param(95830, 10880, 12, id="H100 NVL 1g"),
        pytest.param(95830, 47232, 47, id="H100 NVL 3g"),
        pytest.param(143771, 16384, 18, id="H200 1g"),
        pytest.param(143771, 33280, 35, id="H200 2g"),
        pytest.param(143771, 71168, 71, id="H200 3g, exactly 70.5"),
        pytest.param(143771, 143360, 141, id="H200 7g"),
        pytest.param(183359, 21504, 23, id="B200 1g, exactly 22.5"),
        pytest.param(183359, 45056, 45, id="B200 2g"),
        pytest.param(189471, 23552, 23, id="GB200 1g"),
        pytest.param(189471, 94208, 93, id="GB200 3g"),
        pytest.param(275040, 136192, 135, id="B300 3g, exactly 134.5"),
        pytest.param(97887, 24192, 24, id="RTX PRO 6000 1g"),
    ],
)
def test_memory_in_a_name_is_rounded_as_the_driver_rounds(
    total_mib: int, instance_mib: int, expected: int
) -> None:
    got = profile_name.nominal_gb(instance_mib=instance_mib, total_bytes=total_mib * 2**20)
    assert got == expected


@pytest.mark.parametrize("total_gib", [24, 40, 80])
def test_memory_is_rounded_up_to_the_next_eighth_of_the_whole(total_gib: int) -> None:
    for step in range(1, 32 * total_gib + 1):
        instance_mib = step * 32
        share = math.ceil(fractions.Fraction(instance_mib, 128 * total_gib))
        expected = math.floor(fractions.Fraction(share * total_gib, 8) + fractions.Fraction(1, 2))
        assert (
            profile_name.nominal_gb(instance_mib=instance_mib, total_bytes=total_gib * 2**30)
            == expected
        )


@pytest.mark.parametrize("total_bytes", [0, -1])
def test_a_gpu_without_memory_has_no_profile_names(total_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        profile_name.nominal_gb(instance_mib=1, total_bytes=total_bytes)


@pytest.mark.parametrize(
    ("enum_index", "slices", "expected"),
    [
        (0, 1, "1g.24gb"), (1, 2, "2g.24gb"), (2, 3, "3g.24gb"), (3, 4, "4g.24gb"),
        (4, 7, "7g.24gb"), (5, 8, "8g.24gb"), (6, 6, "6g.24gb"), (7, 1, "1g.24gb+me"),
        (8, 2, "2g.24gb+me"), (9, 1, "1g.24gb"), (10, 1, "1g.24gb+gfx"), (11, 2, "2g.24gb+gfx"),
        (12, 4, "4g.24gb+gfx"), (13, 1, "1g.24gb-me"), (14, 2, "2g.24gb-me"),
        (15, 1, "1g.24gb+me.all"), (16, 2, "2g.24gb+me.all"), (17, 3, "3g.24gb+gfx"),
    ],
)  # fmt: skip
def test_every_profile_number_of_nvml_has_a_name(
    enum_index: int, slices: int, expected: str
) -> None:
    named = profile_name.from_nvml(enum_index=enum_index, slice_count=slices, memory_gb=24)
    assert str(named) == expected
    assert named == profile_name.parse(expected)


@pytest.mark.parametrize("enum_index", [-1, 18, 99])
def test_a_profile_number_from_the_future_is_not_given_a_name(enum_index: int) -> None:
    with pytest.raises(ValueError, match="unknown to this version"):
        profile_name.from_nvml(enum_index=enum_index, slice_count=1, memory_gb=5)


A100_80 = ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        pytest.param(
            "1g.5gb", ["1g.10gb", "1g.20gb", "1g.10gb+me"], id="same slices, nearest memory first"
        ),
        pytest.param(
            "1g.5gb+me", ["1g.10gb+me", "1g.10gb", "1g.20gb"], id="same attributes first"
        ),
        pytest.param("1c.2g.10gb", ["1c.2g.20gb"], id="with its compute slices"),
        pytest.param("7g.80gb", [], id="never itself"),
        pytest.param("6g.60gb", [], id="slices that the GPU lacks"),
    ],
)
def test_profiles_that_were_possibly_meant_are_suggested(
    requested: str, expected: list[str]
) -> None:
    suggested = profile_name.suggest(
        profile_name.parse(requested), map(profile_name.parse, A100_80)
    )
    assert [str(each) for each in suggested] == expected
