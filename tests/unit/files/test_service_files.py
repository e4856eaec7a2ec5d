"""The operator's list of the host's services: names in order, or an error that points."""

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core.files import service_files

UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(service|socket|timer|path)")


def parse(text: str) -> tuple[str, ...]:
    return service_files.parse(text, source="c.yaml")


def text_of(*names: str) -> str:
    return "version: v1\nsystemd-services:\n" + "".join(f"- {name}\n" for name in names)


def test_units_keep_the_order_of_the_list_with_sockets_first() -> None:
    assert parse(text_of("nvsm.service", "nvidia-dcgm.service", "a.service")) == (
        *("nvsm.service", "nvidia-dcgm.service", "a.service"),
    )
    names = parse(text_of("nvsm.service", "nvsm.socket", "dcgm.service", "dcgm.timer"))
    assert names == ("nvsm.socket", "dcgm.timer", "nvsm.service", "dcgm.service")
    assert service_files.start_order(names) == (
        *("dcgm.timer", "nvsm.socket"),
        *("dcgm.service", "nvsm.service"),
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "~", "version: v1", text_of()])
def test_an_empty_list_has_no_units(text: str) -> None:
    assert parse(text) == ()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("nvsm", "nvsm.service"),
        ("nvsm.service", "nvsm.service"),
        ("nvsm.core", "nvsm.core.service"),
        ("nvsm.socket", "nvsm.socket"),
        ("gpu@0", "gpu@0.service"),
        ("gpu@dev-0.timer", "gpu@dev-0.timer"),
        ("kubelet", "kubelet.service"),
    ],
)
def test_a_name_without_a_kind_is_that_of_a_service(written: str, meant: str) -> None:
    json = f'{{"version": "v1", "systemd-services": ["{written}"]}}'
    assert parse(text_of(written)) == parse(json) == (meant,)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("mig-manager", "the agent itself"),
        ("mig-manager-boot.service", "the agent itself"),
        ("dbus", "start it again"),
        ("dbus.socket", "start it again"),
        ("dbus-broker.service", "start it again"),
        ("systemd-logind", "start it again"),
        ("multi-user.target", "only units of the kinds"),
        ("system.slice", "only units of the kinds"),
        ("'nvidia-*'", "not the name of a unit"),
        ("gpu@.service", "not the name of a unit"),
        ("../x.service", "not the name of a unit"),
        ("'a b'", "not the name of a unit"),
        ("''", "not the name of a unit"),
        ("nvsm.sérvice", "not the name of a unit"),
        ("a" * 256, "not the name of a unit"),
        ('"nvsm.service\\n"', "not the name of a unit"),
        ("7", "a name such as"),
        ("true", "a name such as"),
        ("[nvsm]", "a name such as"),
        ("", "a name such as"),
    ],
)
def test_units_that_cannot_be_stopped_are_refused_with_their_location(
    written: str, why: str
) -> None:
    with pytest.raises(errors.ConfigError, match=why) as caught:
        parse(text_of("nvsm", written))

    assert str(caught.value).startswith("c.yaml:4:")


def test_a_service_named_twice_is_refused_however_it_is_written() -> None:
    with pytest.raises(errors.ConfigError, match=r"^c\.yaml:4:3: .*twice; first in line 3"):
        parse(text_of("nvsm", "nvsm.service"))


def test_a_list_that_is_too_long_is_refused() -> None:
    names = [f"s{number}" for number in range(service_files.MAX_SERVICES + 1)]

    assert len(parse(text_of(*names[1:]))) == service_files.MAX_SERVICES
    with pytest.raises(errors.ConfigError, match="64 at most"):
        parse(text_of(*names))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("systemd-services: [a]", "'version' is missing"),
        ("version: v2", r"c\.yaml:1:10: version must be the text v1, not 'v2'"),
        ("version: 1", "version must be the text v1"),
        ("version: v1\nsystemd-service: [a]", "did you mean 'systemd-services'"),
        ("version: v1\nsystemd-services: a", "must be a list"),
        ("- a", "expected a mapping"),
        ("version: v1\nversion: v1", "version"),
    ],
)
def test_a_malformed_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(errors.ConfigError, match=why):
        parse(text)


@hypothesis.given(st.text() | st.lists(st.text()).map(lambda names: text_of(*map(repr, names))))
def test_any_text_gives_unit_names_or_a_typed_error(text: str) -> None:
    try:
        units = parse(text)
    except errors.ConfigError:
        return
    assert all(UNIT.fullmatch(unit) for unit in units)
    assert len(set(units)) == len(units)
