"""``doctor`` on a simulated node with faults."""

import dataclasses
import pathlib
from collections.abc import Mapping

from mig_manager.catalogue import hardware
from mig_manager.cli import registry
from mig_manager.cli.doctor import doctor_facts, doctor_report, doctor_settings, examination
from mig_manager.cli.toolkit import console, parser
from mig_manager.core import model
from mig_manager.sandbox.driver import state_file, states
from testkit import nvml_faults
from tests.rigs.driver import gpus_in_process

SPEC = "2xA100-SXM4-40GB"
FAIL, WARN, OK, SKIPPED = (
    doctor_report.CheckResult.FAIL,
    doctor_report.CheckResult.WARN,
    doctor_report.CheckResult.OK,
    doctor_report.CheckResult.SKIPPED,
)


class Findings:
    """The findings of some checks, by check."""

    def __init__(self, report: doctor_report.DoctorReport) -> None:
        self.by_check: dict[str, list[doctor_report.Finding]] = {}
        for check, finding in report.findings:
            self.by_check.setdefault(check, []).append(finding)

    def result_of(self, check: str) -> doctor_report.CheckResult:
        worst = (FAIL, WARN, OK, SKIPPED)
        return min((f.result for f in self.by_check[check]), key=worst.index)

    def text(self, check: str) -> str:
        return "; ".join(finding.text for finding in self.by_check[check])

    def remedies(self, check: str) -> str:
        return "; ".join(finding.remedy for finding in self.by_check[check])

    @property
    def failing(self) -> set[str]:
        return {name for name in self.by_check if self.result_of(name) is FAIL}


class DoctorRig:
    """A simulated node for ``doctor``; ``path`` is its state file, below ``folder`` if None."""

    def __init__(self, folder: pathlib.Path, path: pathlib.Path | None = None) -> None:
        self.folder = folder
        self.path = path or folder / "gpus.json"
        self.state = nvml_faults.SharedState(self.path)
        self.argv = ["--simulate-state", str(self.path)]

    def create(self, **options: object) -> "DoctorRig":
        simulation = dataclasses.replace(states.Options(), **options)  # type: ignore[arg-type]
        state_file.SharedState(self.path).create(SPEC, options=simulation)
        return self

    def settings(self, *argv: str, **changes: object) -> doctor_settings.DoctorSettings:
        settings = doctor_settings.DoctorSettings.read(
            parser.parse(registry.PROGRAM, ["doctor", *self.argv, *argv]),
            {"HOME": str(self.folder)},
        )
        return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]

    def examine(self, *argv: str, has_worker: bool = False, **changes: object) -> Findings:
        """Examine the node; without workers, whose start takes longer than all checks."""
        replace = console.keep if has_worker else gpus_in_process.replace
        facts = doctor_facts.facts(self.settings(*argv, **changes), replace)
        return Findings(examination.examine(examination.CHECKS, facts, timeout_s=60.0))

    def check(
        self, name: str, facts: Mapping[str, object] | None = None, **settings: object
    ) -> Findings:
        """Run one check.

        ``facts`` are fields of ``Facts`` that the check shall not find out, ``settings`` are
        fields of ``DoctorSettings``.
        """
        changed = {
            each: doctor_facts.Once(lambda value=value: value, what=each)  # type: ignore[misc]
            for each, value in (facts or {}).items()
        }
        read = doctor_facts.facts(self.settings(**settings))
        checks = [each for each in examination.CHECKS if each.name == name]
        read = dataclasses.replace(read, **changed)  # type: ignore[arg-type]
        return Findings(examination.examine(checks, read, timeout_s=60.0))

    def set_modes(self, *, is_enabled: bool, is_pending: bool) -> None:
        """Set the MIG modes of every simulated GPU."""
        changed = tuple(
            dataclasses.replace(gpu, is_enabled=is_enabled, is_pending=is_pending)
            for gpu in self.state.read().gpus
        )
        self.state.update(lambda node: dataclasses.replace(node, gpus=changed))


def gpus(*there: model.Gpu) -> dict[str, object]:
    return {"gpus": model.ObservedGpus(there)}


def a_gpu(product: str = "A100-SXM4-40GB") -> model.Gpu:
    return hardware.template(hardware.find(product), 0)
