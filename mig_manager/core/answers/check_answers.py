"""The answers of ``validate`` and ``doctor``."""

from typing import Annotated, Literal, NotRequired, TypedDict

from mig_manager.core.answers.values import Strategy

Fit = Annotated[str, "core.layout.layout_fit.Fit"]


class _LayoutVerdict(TypedDict):
    layout: str
    origin: str
    product: str
    fit: Fit
    why: str
    place: str | None  # place of the rule that does not fit
    unserved_mig_strategies: dict[Strategy, str]  # why the device plugin would exit


class Validation(TypedDict):
    """Answer of 'mig-manager validate' and 'kubectl mig validate'."""

    kind: Literal["Validation"]
    source: str
    is_valid: bool
    verdicts: list[_LayoutVerdict]  # empty with '--portable', which compares no GPUs
    not_portable: NotRequired[
        list[str]
    ]  # what nvidia-mig-parted cannot read; not in kubectl mig's answer
    warnings: NotRequired[list[str]]  # not in kubectl mig's answer
    error: NotRequired[str]  # why a file of '--files' is invalid; it then has no verdicts


class Validations(TypedDict):
    """Answer of 'mig-manager validate --files'."""

    kind: Literal["Validations"]
    is_valid: bool
    files: list[Validation]


_CheckResult = Annotated[str, "cli.doctor.doctor_report.CheckResult"]


class _Finding(TypedDict):
    check: str
    result: _CheckResult
    found: str
    remedy: str


class Doctor(TypedDict):
    """Answer of 'mig-manager doctor'."""

    kind: Literal["Doctor"]
    is_good: bool
    counts: dict[_CheckResult, int]
    findings: list[_Finding]
