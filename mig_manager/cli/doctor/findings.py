"""What ``doctor`` looks at, and what it found: checks, verdicts, findings."""

import concurrent.futures
import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from mig_manager import errors
from mig_manager.adapters.nvml import hung_call


class Check(enum.Enum):
    """What is looked at; the values are a public contract, the order is that of the answer."""

    DRIVER = "driver"
    GPUS = "gpus"
    VIRTUALIZATION = "virtualization"
    INSTANCES = "instances"
    HOLDERS = "holders"
    PRIVILEGES = "privileges"
    MIG_CONFIG_RIGHT = "mig-config-right"
    KERNEL_MODULES = "kernel-modules"
    LOCK = "lock"
    CONFIG_FILE = "config-file"
    PROVEN_FILE = "proven-file"
    JOURNAL_FILE = "journal-file"
    POD_RESOURCES = "pod-resources"
    OFFERED_DEVICES = "offered-devices"
    API = "api"
    RIGHTS = "rights"
    DEVICE_PLUGIN = "device-plugin"
    INTERRUPTED_RUN = "interrupted-run"
    FOREIGN_MANAGERS = "foreign-managers"

    @property
    def meaning(self) -> str:
        """What is well when the check is."""
        return _TOLD[self][0]

    @property
    def remedy(self) -> str:
        """What to do where the finding itself knows nothing better."""
        return _TOLD[self][1]


_TOLD: Mapping[Check, tuple[str, str]] = {
    Check.DRIVER: (
        "NVML's library is found, loads, and reaches the driver.",
        "Load the NVIDIA driver, or say where its library is (--library-path, --driver-root).",
    ),
    Check.GPUS: (
        "Every GPU answers; at least one has MIG; no switch of MIG mode is pending.",
        "Reset the GPU named, or reboot the node; a layout may also name the other MIG mode.",
    ),
    Check.VIRTUALIZATION: (
        "The GPUs are not those of a virtual machine that cannot switch or divide them.",
        "Switch MIG on where the GPU belongs to: on the host of the virtual machine.",
    ),
    Check.INSTANCES: (
        "No GPU instance is without a compute instance.",
        "Apply a layout ('mig-manager apply'): it removes what nothing can use.",
    ),
    Check.HOLDERS: (
        "Nobody holds a GPU that waits for a reset; says who holds which.",
        "Stop what is named; a GPU that is held cannot be reset.",
    ),
    Check.PRIVILEGES: (
        "This user may do what a change of MIG needs.",
        "Run as root, with the capabilities SYS_ADMIN and MKNOD.",
    ),
    Check.MIG_CONFIG_RIGHT: (
        "The driver lets this process change MIG instances.",
        "Run as root, or have the container toolkit give NVIDIA_MIG_CONFIG_DEVICES=all.",
    ),
    Check.KERNEL_MODULES: (
        "The driver's modules are loaded, and none is in use that can hold off a reset.",
        "Stop what uses nvidia_drm (a display server) or the persistence daemon for the change.",
    ),
    Check.LOCK: (
        "No other manager is at work on this node.",
        "Wait for the other manager to finish, or stop it.",
    ),
    Check.CONFIG_FILE: (
        "The config file has layouts and no mistake.",
        "Correct the file at the place named.",
    ),
    Check.PROVEN_FILE: (
        "What is kept for the next boot can be read.",
        "Remove the file; the next 'apply' that succeeds writes it anew.",
    ),
    Check.JOURNAL_FILE: (
        "No 'apply' was left half done.",
        "Run 'mig-manager apply' or 'mig-manager boot': it first ends or undoes what was begun.",
    ),
    Check.POD_RESOURCES: (
        "Kubelet tells over its PodResources socket which pod has which device.",
        "Mount kubelet's pod-resources folder, or name the socket (--pod-resources-socket).",
    ),
    Check.OFFERED_DEVICES: (
        "Kubelet offers exactly the devices that the GPUs have.",
        "Look at the device plugin's log, and restart its pod.",
    ),
    Check.API: (
        "The Kubernetes API takes our credentials and knows the node.",
        "Check --kubeconfig, --node-name and the way to the API.",
    ),
    Check.RIGHTS: (
        "The credentials have every right that the agent needs.",
        "Grant the agent's ServiceAccount the rules in deploy/base/rbac.yaml.",
    ),
    Check.DEVICE_PLUGIN: (
        "NVIDIA's device plugin runs on this node and is ready.",
        "Deploy the device plugin, or look at its pod on this node.",
    ),
    Check.INTERRUPTED_RUN: (
        "No change was left half done: nothing is paused, tainted or in the journal.",
        "Start the agent on this node: it gives back what an interrupted run has taken.",
    ),
    Check.FOREIGN_MANAGERS: (
        "No other program manages MIG on this node.",
        "Let one manager have this node's GPUs: remove the other.",
    ),
}


class Verdict(enum.Enum):
    """What a finding means."""

    OK = "ok"
    WARN = "warn"
    """Works, but something will go wrong or is not as it should be."""
    FAIL = "fail"
    SKIPPED = "skipped"
    """Not looked at; the finding says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found."""

    check: Check
    verdict: Verdict
    found: str
    """One sentence or less for people."""
    own_remedy: str = ""
    """What to do about just this; empty: what the check says."""

    @property
    def remedy(self) -> str:
        """What to do; empty when there is nothing to do."""
        if self.verdict in (Verdict.OK, Verdict.SKIPPED):
            return ""
        return self.own_remedy or self.check.remedy

    def to_data(self) -> dict[str, str]:
        """Return plain data for JSON and YAML."""
        return {
            "check": self.check.value,
            "verdict": self.verdict.value,
            "found": self.found,
            "remedy": self.remedy,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What all checks found, in the order of ``Check``."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing fails."""
        return all(finding.verdict is not Verdict.FAIL for finding in self.findings)

    def count(self, verdict: Verdict) -> int:
        """Return how many findings have this verdict."""
        return sum(finding.verdict is verdict for finding in self.findings)

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        return {
            "is_good": self.is_good,
            "counts": {verdict.value: self.count(verdict) for verdict in Verdict},
            "findings": [finding.to_data() for finding in self.findings],
        }


_Fact = TypeVar("_Fact")


class NotAskedError(Exception):
    """There is nothing to check here, and that is no failure; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One thing that a check found."""

    verdict: Verdict
    text: str
    remedy: str = ""
    """Empty: what the check says."""


Look = Callable[[], Sequence[Found]]


def ok(text: str) -> Found:
    """Return that something is as it should be."""
    return Found(verdict=Verdict.OK, text=text)


def warn(text: str, remedy: str = "") -> Found:
    """Return that something is not as it should be, and yet works."""
    return Found(verdict=Verdict.WARN, text=text, remedy=remedy)


def fail(text: str, remedy: str = "") -> Found:
    """Return that something does not work."""
    return Found(verdict=Verdict.FAIL, text=text, remedy=remedy)


def skipped(text: str) -> Found:
    """Return why something was not looked at."""
    return Found(verdict=Verdict.SKIPPED, text=text)


class Once(Generic[_Fact]):
    """A fact that several checks need: asked by the first, and waited for by the others.

    Args:
        ask: Gets it; may fail, and does so for all.
        what: What it is, for checks that cannot go on without it.
    """

    def __init__(self, ask: Callable[[], _Fact], *, what: str) -> None:
        self._ask = ask
        self._what = what
        self._lock = threading.Lock()
        self._answer: concurrent.futures.Future[_Fact] | None = None

    def get(self) -> _Fact:
        """Return the fact.

        Raises:
            Exception: What asking raised.
        """
        with self._lock:
            is_first = self._answer is None
            answer = self._answer = self._answer or concurrent.futures.Future()
        if is_first:
            try:
                answer.set_result(self._ask())
            except BaseException as error:  # noqa: BLE001 - raised again for whoever asks
                answer.set_exception(error)
        return answer.result()

    def needed(self) -> _Fact:
        """Return the fact, for a check that is about something else.

        Raises:
            NotAskedError: It cannot be had; why, the check says that is about it.
        """
        try:
            return self.get()
        except NotAskedError:
            raise
        except Exception as error:
            raise NotAskedError(f"not known: {self._what}") from error

    def if_told(self) -> _Fact | None:
        """Return the fact, or None where it cannot be had."""
        try:
            return self.needed()
        except NotAskedError:
            return None


def run(looks: Mapping[Check, Look], *, timeout_s: float) -> Report:
    """Do all checks at once; one that hangs or breaks is a finding and hides no other.

    Args:
        looks: What to look at.
        timeout_s: How long all of it may take.
    """
    deadline = time.monotonic() + timeout_s
    answers = {check: hung_call.CallThread(look) for check, look in looks.items()}
    return Report(
        findings=tuple(
            Finding(check=check, verdict=found.verdict, found=found.text, own_remedy=found.remedy)
            for check in Check
            if check in answers
            for found in _told(answers[check], deadline, timeout_s)
        )
    )


def _told(
    answer: hung_call.CallThread[Sequence[Found]], deadline: float, timeout_s: float
) -> Sequence[Found]:
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return (fail(f"no answer within {timeout_s:g} s"),)
    except NotAskedError as why:
        return (skipped(str(why)),)
    except errors.MigManagerError as error:
        return (fail(error.message, _remedy(error)),)
    except Exception as error:  # noqa: BLE001 - one check that breaks must not hide the others
        what = f"the check broke: {type(error).__name__}: {error}"
        return (fail(what, errors.Reason.INTERNAL.remedy),)


def _remedy(error: errors.MigManagerError) -> str:
    """Return what to do; empty where the check knows better which file or option it was."""
    is_vague = error.reason in (errors.Reason.USAGE, errors.Reason.INVALID_CONFIG)
    return "" if is_vague else error.reason.remedy
