"""systemd over a real D-Bus: who runs, stopping, starting, and all that goes wrong."""

import dataclasses
import pathlib

import pytest

from mig_manager.adapters.host import systemd
from mig_manager.core.files import service_files
from mig_manager.reasons import Reason
from tests.rigs.host import systemd_rig
from tests.rigs.host.systemd_rig import NO_LIMIT_US, NVSM, Act, Unit, fails, fake_systemd, services
from tests.rigs.host.systemd_rig import DBusDaemon as Bus

DCGM, OTHER = "nvidia-dcgm.service", "other.service"
EXPORTER, SOCKET = "dcgm-exporter.service", "nvsm.socket"


# -- who runs ---------------------------------------------------------------------------------


def test_running_units_are_listed_in_stop_order_without_masked_ones(bus: Bus) -> None:
    states = ["inactive", "active", "reloading", "activating", "failed", "deactivating"]
    units = {f"{state}.service": Unit(state=state) for state in states}
    units["masked.service"] = Unit(load="masked")
    for job in ("restart", "start", "stop"):
        units[f"job-{job}.service"] = Unit(state="deactivating", job_type=job)

    with fake_systemd(bus, units):
        running = services(bus).running([*reversed(units), "unknown.service"])

    assert running == tuple(
        f"{name}.service"
        for name in ("job-start", "job-restart", "activating", "reloading", "active")
    )


def test_an_empty_list_of_units_causes_no_call() -> None:
    nowhere = systemd.Systemd("unix:path=/nowhere", stop_timeout_s=1, start_timeout_s=1)

    assert nowhere.running([]) == ()


# -- stopping and starting --------------------------------------------------------------------


def stop_and_start(host: systemd.Systemd, *names: str) -> tuple[str, ...]:
    """Stop what runs of these units as a change does, and start it again; return what ran."""
    ran = host.running(names)
    for name in ran:
        host.stop(name)
    for name in service_files.start_order(ran):
        host.start(name)
    return ran


def test_a_socket_listed_before_or_after_its_service_is_up_again_with_it(bus: Bus) -> None:
    for listed in ((SOCKET, NVSM), (NVSM, SOCKET)):
        units = {SOCKET: Unit(triggers=NVSM), NVSM: Unit()}
        with fake_systemd(bus, units) as played:
            stop_and_start(services(bus), *listed)

        assert [unit.state for unit in units.values()] == ["active", "active"]
        assert played.calls == [
            f"StopUnit {SOCKET} replace",
            f"StopUnit {NVSM} replace",
            f"StartUnit {SOCKET} replace",
            f"StartUnit {NVSM} replace",
        ]


def test_units_stopped_along_with_a_unit_run_again_afterwards(bus: Bus) -> None:
    units = {
        DCGM: Unit(required_by=(EXPORTER, "idle.service", "gpu.target")),
        EXPORTER: Unit(parts=("scrape.timer",)),
        "scrape.timer": Unit(),
        "idle.service": Unit(state="inactive"),
        "gpu.target": Unit(parts=(OTHER,)),
        OTHER: Unit(),
        NVSM: Unit(),
    }
    up = {name for name, unit in units.items() if unit.state == "active"}

    with fake_systemd(bus, units):
        ran = stop_and_start(services(bus), DCGM)

    assert set(ran) == {DCGM, EXPORTER, "scrape.timer", OTHER}
    assert ran.index("scrape.timer") < ran.index(EXPORTER) < ran.index(DCGM)
    # A target of its own has nothing that could use a GPU.
    assert {name for name, unit in units.items() if unit.state == "active"} == up - {"gpu.target"}


def test_only_what_is_listed_or_stops_along_with_it_may_have_been_stopped(bus: Bus) -> None:
    units = {
        DCGM: Unit(state="inactive", required_by=(EXPORTER, "gpu.target", "dbus.service")),
        EXPORTER: Unit(state="inactive", parts=("scrape.timer",)),
        "scrape.timer": Unit(state="inactive"),
        "gpu.target": Unit(parts=(OTHER,)),
        OTHER: Unit(),
        NVSM: Unit(),
        "dbus.service": Unit(),
        "debug-shell.service": Unit(),
    }
    names = [*units, "../x.service", ""]
    with fake_systemd(bus, units):
        may = [name for name in names if services(bus).may_have_stopped(name, [DCGM])]
    assert may == [DCGM, EXPORTER, "scrape.timer", OTHER]


@pytest.mark.parametrize("name", ["mig-manager.service", "dbus.service"])
def test_a_unit_that_would_take_the_agent_or_the_bus_along_is_not_stopped(
    bus: Bus, name: str
) -> None:
    units = {DCGM: Unit(required_by=(name,)), name: Unit()}

    with (
        fake_systemd(bus, units) as played,
        fails(Reason.HOST_SERVICE_FAILED, f"systemd would also stop {name}"),
    ):
        services(bus).running([DCGM])

    assert played.calls == []


@pytest.mark.parametrize("name", [NVSM, SOCKET])
def test_a_unit_has_systemds_own_stop_time_out(bus: Bus, name: str) -> None:
    unit = Unit(stops=Act("inactive", takes_s=0.6), stop_timeout_us=60_000_000)

    with fake_systemd(bus, {name: unit}):
        services(bus, stop_timeout_s=0.1).stop(name)

    assert unit.state == "inactive"


def test_a_slow_unit_is_waited_for_and_whether_it_was_down_is_returned(bus: Bus) -> None:
    unit = Unit(stops=Act("inactive", takes_s=0.3), starts=Act("active", takes_s=0.3))

    with fake_systemd(bus, {NVSM: unit}):
        host = services(bus)
        host.stop(NVSM)
        assert unit.state == "inactive"
        assert host.start(NVSM)
        assert unit.state == "active"
        assert not host.start(NVSM)


def test_a_unit_that_fails_while_stopping_or_is_unknown_has_stopped(bus: Bus) -> None:
    with fake_systemd(bus, {NVSM: Unit(stops=Act("failed", "failed"))}) as played:
        services(bus).stop(NVSM)
        services(bus).stop(OTHER)

    assert len(played.calls) == 1


def test_the_end_of_a_job_is_detected_without_its_signal(bus: Bus) -> None:
    unit = Unit(
        stops=Act("inactive", is_sent=False), starts=Act("active", takes_s=0.1, is_sent=False)
    )

    with fake_systemd(bus, {NVSM: unit}):
        services(bus).stop(NVSM)
        services(bus).start(NVSM)

    assert unit.state == "active"


def test_the_end_of_another_units_job_does_not_end_the_wait(bus: Bus) -> None:
    units = {
        DCGM: Unit(required_by=(EXPORTER,), stops=Act("inactive", takes_s=0.5)),
        EXPORTER: Unit(),
    }

    with fake_systemd(bus, units):
        services(bus).stop(DCGM)

    assert units[DCGM].state == "inactive"


def test_a_job_that_ends_while_it_is_queried_keeps_its_result(bus: Bus) -> None:
    unit = Unit(stops=Act("active", "canceled", takes_s=60.0))

    with fake_systemd(bus, {NVSM: unit}) as played:
        played.callbacks.add("Get", played.end_jobs)
        with fails(Reason.HOST_SERVICE_FAILED, "another request replaced the one to stop it"):
            services(bus).stop(NVSM)


Table = dict[str, tuple[Unit, str]]
NOT_DOWN: Table = {
    "slow.service": (
        Unit(stops=Act("inactive", takes_s=60.0), stop_timeout_us=NO_LIMIT_US),
        r"did not stop within 0\.2 s.*deactiv",
    ),
    "again.service": (Unit(stops=Act("active")), "something else starts it"),
    "replaced.service": (Unit(stops=Act("active", "canceled")), "another request replaced"),
    "late.service": (Unit(stops=Act("active", "timeout")), "did not stop: timeout"),
}
NOT_UP: Table = {
    "slow.service": (
        Unit(state="inactive", starts=Act("active", takes_s=60.0)),
        r"did not start within 0\.2 s; it is activating",
    ),
    "exits.service": (
        Unit(starts=Act("failed", "failed"), service_result="exit-code", status=3),
        "did not start: exit-code, status 3; it is failed",
    ),
    "killed.service": (
        Unit(starts=Act("failed"), service_result="signal", status=9),
        "did not start: signal, status 9; it is failed",
    ),
    "late.service": (Unit(starts=Act("failed", "timeout")), "longer than systemd allows"),
    "needs.service": (Unit(starts=Act("inactive", "dependency")), "a unit that it needs failed"),
    "replaced.service": (Unit(starts=Act("inactive", "canceled")), "another request replaced"),
    "dies.service": (
        Unit(starts=Act("activating"), sub="auto-restart", service_result="core-dump"),
        "did not start: core-dump",
    ),
}


@pytest.mark.parametrize(("table", "method"), [(NOT_DOWN, "stop"), (NOT_UP, "start")])
def test_unit_that_fails_to_stop_or_start_has_systemds_message(
    bus: Bus, table: Table, method: str
) -> None:
    with fake_systemd(bus, {name: unit for name, (unit, _) in table.items()}):
        for name, (_, why) in table.items():
            timeout_s = 0.2 if name == "slow.service" else 10.0
            host = services(bus, stop_timeout_s=timeout_s, start_timeout_s=timeout_s)
            with fails(Reason.HOST_SERVICE_FAILED, rf"{name} .*{why}"):
                getattr(host, method)(name)


def test_a_unit_that_is_still_stopping_is_not_waited_for_to_start(bus: Bus) -> None:
    stuck = Unit(state="deactivating", starts=Act("active", takes_s=60.0))
    host = dataclasses.replace(services(bus, start_timeout_s=60.0), stopping_timeout_s=0.2)

    with fake_systemd(bus, {NVSM: stuck}) as played:
        with fails(
            Reason.HOST_SERVICE_FAILED, r"^nvsm\.service is still stopping; systemd starts"
        ):
            host.start(NVSM)
        assert played.calls == ["StartUnit nvsm.service replace"]


def test_unit_that_ran_to_its_end_started_and_a_missing_one_failed(bus: Bus) -> None:
    why = r"starting other\.service: Unit other.* not found"

    with fake_systemd(bus, {NVSM: Unit(starts=Act("inactive"), sub="dead")}):
        services(bus).start(NVSM)
        with fails(Reason.HOST_SERVICE_FAILED, why):
            services(bus).start(OTHER)


def test_a_refusal_is_quoted(bus: Bus) -> None:
    quoted = Reason.HOST_SERVICE_FAILED, "it says no"
    with fake_systemd(bus) as played:
        for name, (reason, why) in {
            f"{systemd_rig.SYSTEMD}.OnlyByDependency": quoted,
            f"{systemd_rig.SYSTEMD}.UnitMasked": quoted,
            systemd_rig.DENIED: (Reason.NO_PERMISSION, "it says no .*as the host's root"),
        }.items():
            refusal = Act("active", error=(name, "it says no."))
            played.units[NVSM] = Unit(stops=refusal, starts=refusal)
            with fails(reason, rf"^stopping nvsm\.service: {why}"):
                services(bus).stop(NVSM)
            with fails(reason, rf"^starting nvsm\.service: {why}"):
                services(bus).start(NVSM)


def test_a_refusal_by_the_bus_has_the_reason_no_permission(tmp_path: pathlib.Path) -> None:
    forbidden = '<deny send_interface="org.freedesktop.systemd1.Manager" send_member="StopUnit"/>'

    with (
        systemd_rig.a_bus(tmp_path, denied=forbidden) as bus,
        fake_systemd(bus, {NVSM: Unit()}),
        fails(Reason.NO_PERMISSION, r"^stopping nvsm\.service: .*as the host's root"),
    ):
        services(bus).stop(NVSM)
