"""Compare a captured GPU with its product: every difference, and what it means for the owner."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from mig_manager.core import model
from mig_manager.core.acceptance import meanings
from mig_manager.core.acceptance.meanings import Effect, Subject

if TYPE_CHECKING:
    from mig_manager.core.answers import captures


class Verdict(enum.Enum):
    """Whether the GPUs behave as expected."""

    AS_EXPECTED = "as-expected"
    DIFFERS = "differs"  # changes of layouts are not affected
    REVIEW = "review"  # changes of layouts may be affected


_UNCOMPARED = {
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    # Of the board, not of the product.
    "nvmlDeviceGetGpuFabricInfo",
}
"""Functions whose answers depend on instances, which the simulated GPU lacks, or on the board."""


def verdict(differences: "Iterable[captures.Difference]") -> Verdict:
    """Return the verdict for all differences."""
    effects = {each["effect"] for each in differences}
    if Effect.CHANGES.value in effects:
        return Verdict.REVIEW
    return Verdict.DIFFERS if effects else Verdict.AS_EXPECTED


def of_gpu(
    index: int,
    actual: "captures.CapturedGpu",
    expected: "captures.CapturedGpu | None",
    *,
    instance_ids: Callable[[model.Placement], frozenset[int]],
) -> "Iterator[captures.Difference]":
    """Yield the differences of a captured GPU.

    Args:
        index: Its number in the capture.
        actual: The GPU.
        expected: The same product under the simulated driver; None: no product is like it.
        instance_ids: Returns the ids that a GPU instance at a placement can have.
    """
    comparison = Comparison(index)
    if actual["unreachable"] is not None:
        yield comparison.of(Subject.UNREACHABLE, "the GPU", "reachable", actual["unreachable"])
        return
    if expected is None:
        what = f"{actual['name']}, PCI device id {actual['pci_device_id']}"
        yield comparison.of(Subject.PRODUCT, "the product", "in the catalogue", what)
    elif (actual["mig_mode"] is None) is not (expected["mig_mode"] is None):
        # All else that differs follows from it.
        with_mig = {True: "without MIG", False: "with MIG"}
        expected_mig, actual_mig = (
            with_mig[each["mig_mode"] is None] for each in (expected, actual)
        )
        yield comparison.of(Subject.MIG, "the GPU", expected_mig, actual_mig)
    else:
        yield from _facts(comparison, actual, expected)
        yield from _profiles(comparison, actual, expected)
        yield from _behaviour(comparison, actual, expected, instance_ids)
    for rule, is_followed in actual["rules"].items():
        if not is_followed:
            is_order = meanings.ORDER_RULE in rule
            yield comparison.of(
                Subject.RULE,
                rule,
                "yes",
                "no",
                *((Effect.NONE, meanings.ORDER) if is_order else ()),
            )


def of_library(
    actual: Mapping[str, list[str]], expected: Mapping[str, list[str]], *, are_all_reachable: bool
) -> "Iterator[captures.Difference]":
    """Yield the differences of functions that concern no GPU, by their answers."""
    usual = meanings.WORKS if are_all_reachable else meanings.LOST
    return _functions(Comparison(None), actual, expected, usual)


def of_faults(
    actions: Iterable[model.RecoveryAction | None],
) -> "Iterator[captures.Difference]":
    """Yield the GPUs that need recovery, from the recovery action of each."""
    none = model.RecoveryAction.NONE
    for index, action in enumerate(actions):
        if action is not None and action is not none:
            comparison = Comparison(index)
            yield comparison.of(Subject.FAULT, "its recovery action", none.value, action.value)


class Comparison:
    """Builds the differences of one GPU."""

    def __init__(self, gpu: int | None) -> None:
        self._gpu = gpu

    def of(
        self,
        subject: Subject,
        what: str,
        expected: object,
        actual: object,
        effect: Effect | None = None,
        consequence: str = "",
    ) -> "captures.Difference":
        """Return a difference, with the usual effect of its subject unless one is given."""
        usual = meanings.USUAL.get(subject, (Effect.NONE, ""))
        return {
            "gpu": self._gpu,
            "subject": subject.value,
            "what": what,
            "expected": str(expected),
            "actual": str(actual),
            "effect": (effect or usual[0]).value,
            "consequence": consequence or usual[1],
        }

    def of_fields(
        self,
        rows: Iterable[tuple[Subject, str, str]],
        actual: Mapping[str, object],
        expected: Mapping[str, object],
        *,
        prefix: str = "",
    ) -> "Iterator[captures.Difference]":
        """Yield a difference for each key whose values differ."""
        for subject, what, key in rows:
            one, other = actual.get(key), expected.get(key)
            if one != other:
                yield self.of(subject, f"{prefix}{what}", other, one)


def _facts(
    comparison: Comparison, actual: "captures.CapturedGpu", expected: "captures.CapturedGpu"
) -> "Iterator[captures.Difference]":
    rows = (
        (Subject.NAME, "its name", "name"),
        (Subject.ARCHITECTURE, "its generation", "architecture"),
        (Subject.MEMORY, "its memory in MiB", "memory_mib"),
        (Subject.MODE_CHANGE, "a change of MIG mode resets it", "mode_change_needs_reset"),
    )
    yield from comparison.of_fields(rows, actual, expected)
    if (fabric := actual["fabric"]) is not None and fabric["state"] != "completed":
        what = "its registration with the NVSwitch fabric"
        yield comparison.of(Subject.FABRIC, what, "completed", fabric["state"])


def _profiles(
    comparison: Comparison, actual: "captures.CapturedGpu", expected: "captures.CapturedGpu"
) -> "Iterator[captures.Difference]":
    if actual["profiles"] is None or expected["profiles"] is None:
        if actual["profiles"] is not expected["profiles"]:
            yield comparison.of(
                Subject.WITHHELD, "profiles and placements", "reported", "withheld"
            )
        return
    actual_rows = {row["enum"]: row for row in actual["profiles"]}
    expected_rows = {row["enum"]: row for row in expected["profiles"]}
    for number in sorted(actual_rows | expected_rows):
        if number not in actual_rows:
            name = expected_rows[number]["name"]
            yield comparison.of(Subject.PROFILE_MISSING, f"profile {name}", "listed", "not listed")
        elif number not in expected_rows:
            name = actual_rows[number]["name"]
            yield comparison.of(Subject.PROFILE_ADDED, f"profile {name}", "not listed", "listed")
        else:
            yield from _profile(comparison, actual_rows[number], expected_rows[number])


def _profile(
    comparison: Comparison,
    actual: "captures.CapturedProfile",
    expected: "captures.CapturedProfile",
) -> "Iterator[captures.Difference]":
    rows = (
        (Subject.PROFILE_NAME, "name", "name"),
        (Subject.PROFILE_ID, "id", "id"),
        (Subject.SLICES, "slices", "slices"),
        (Subject.PROFILE_MEMORY, "memory in MiB", "memory_mib"),
        (Subject.MULTIPROCESSORS, "multiprocessors", "multiprocessors"),
        (Subject.CAPACITY, "maximum instances", "max_instances"),
        (Subject.ENGINES, "copy engines, decoders, encoders, JPEG, OFA", "engines"),
    )
    name = f"profile {expected['name']}"
    yield from comparison.of_fields(rows, actual, expected, prefix=f"{name}: ")
    for place in expected["placements"]:
        if place not in actual["placements"]:
            what = f"{name} at {place}"
            yield comparison.of(Subject.PLACEMENT_MISSING, what, "possible", "not possible")
    for place in actual["placements"]:
        if place not in expected["placements"]:
            what = f"{name} at {place}"
            yield comparison.of(Subject.PLACEMENT_ADDED, what, "not possible", "possible")
    one, other = actual["compute_profiles"], expected["compute_profiles"]
    if one is not None and other is not None and (mine := _pack(one)) != (theirs := _pack(other)):
        what = f"{name}: compute-instance profiles (id, slices, multiprocessors, maximum)"
        yield comparison.of(Subject.COMPUTE_PROFILES, what, theirs, mine)


def _pack(rows: "list[captures.CapturedComputeProfile]") -> str:
    """Return the profiles as text; placements are left out, as the catalogue's are inferred."""
    keys = [
        (row["id"], row["slices"], row["multiprocessors"], row["max_instances"]) for row in rows
    ]
    return ", ".join("/".join(map(str, key)) for key in sorted(keys))


def _behaviour(
    comparison: Comparison,
    actual: "captures.CapturedGpu",
    expected: "captures.CapturedGpu",
    instance_ids: Callable[[model.Placement], frozenset[int]],
) -> "Iterator[captures.Difference]":
    for instance in actual["instances"]:
        place = model.Placement(*map(int, instance["placement"].split(":")))
        ids = instance_ids(place)
        if ids and instance["id"] not in ids:
            what = f"id of the GPU instance {instance['profile']} at {place}"
            possible = " or ".join(map(str, sorted(ids)))
            yield comparison.of(Subject.INSTANCE_ID, what, possible, instance["id"])
    expected_answers = {each["call"]: each["answer"] for each in expected["answers"]}
    for probe in actual["answers"]:
        answer = expected_answers.get(probe["call"], probe["answer"])
        if probe["answer"] != answer:
            is_handled = probe["is_handled"]
            yield comparison.of(
                Subject.ANSWER,
                probe["call"],
                answer,
                probe["answer"],
                Effect.NONE if is_handled else Effect.CHANGES,
                meanings.HANDLED if is_handled else meanings.UNHANDLED,
            )
    yield from _functions(comparison, actual["functions"], expected["functions"])


def _functions(
    comparison: Comparison,
    actual: Mapping[str, list[str]],
    expected: Mapping[str, list[str]],
    usual: str = meanings.WORKS,
) -> "Iterator[captures.Difference]":
    """Yield functions with other answers, with the function's consequence or the usual one."""
    for function in sorted((actual.keys() & expected.keys()) - _UNCOMPARED):
        one, other = actual[function], expected[function]
        if one != other:
            consequence = meanings.FUNCTIONS.get(function, usual)
            yield comparison.of(
                Subject.FUNCTION,
                function,
                ", ".join(other),
                ", ".join(one),
                Effect.NONE,
                consequence,
            )
