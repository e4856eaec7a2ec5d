"""The report of ``acceptance``: this machine's GPUs beside what mig-manager expects."""

import collections
import functools
import json
import pathlib
from typing import TYPE_CHECKING

import mig_manager
from mig_manager.cli.acceptance import confirmed_course
from mig_manager.core import messages
from mig_manager.core.acceptance import differences as compared
from mig_manager.core.acceptance import stages, surveys
from mig_manager.core.display import styles
from mig_manager.sandbox import node_spec, twin

if TYPE_CHECKING:
    from mig_manager.core.answers import captures

_SLOWEST = 5  # functions that the summary lists
_VERDICTS = {
    compared.Verdict.AS_EXPECTED: (styles.Tone.GOOD, "these GPUs behave as expected"),
    compared.Verdict.DIFFERS: (styles.Tone.WARN, "no difference affects layouts on these GPUs"),
    compared.Verdict.REVIEW: (styles.Tone.BAD, "a difference may affect layouts: see below"),
}


def catalogue_rows(path: pathlib.Path) -> str:
    """Return a row of the catalogue for each product of a capture, one a line.

    Raises:
        ConfigError: The file cannot be read.
        UsageError: It is no capture.
    """
    return "\n".join(dict.fromkeys(map(json.dumps, node_spec.rows(path))))


def report(
    survey: surveys.Survey,
    course: confirmed_course.ObservedCourse | None = None,
    *,
    is_simulated: bool = False,
    timeout_s: float,
) -> "captures.Acceptance":
    """Compare surveyed GPUs with simulated ones.

    Raises:
        HardwareError: The simulated driver failed.
    """
    captured = surveys.capture(survey)
    if course is not None:
        rows = course.result.compute_profiles
        captured[course.gpu] = surveys.with_compute_profiles(captured[course.gpu], rows)
    expected = twin.of(captured, timeout_s=timeout_s)
    latencies = survey.latencies(course.calls if course else ())
    called = {each["function"] for each in latencies}
    library = surveys.answers_of(survey.calls)
    differences = [
        *compared.of_library(
            library,
            expected.library,
            are_all_reachable=all(gpu["unreachable"] is None for gpu in captured),
        ),
        *compared.of_faults(each.gpu.recovery_action for each in survey.gpus),
        *(
            difference
            for number, gpu in enumerate(captured)
            for difference in compared.of_gpu(
                number,
                gpu,
                expected.gpus[number],
                instance_ids=functools.partial(expected.instance_ids, number),
            )
        ),
        *(stages.failures(course.gpu, course.result.stages) if course else ()),
    ]
    return {
        "kind": "Acceptance",
        "version": mig_manager.__version__,
        "driver_version": surveys.plain(survey.driver_version),
        "nvml_version": surveys.plain(survey.nvml_version),
        "is_simulated": is_simulated,
        "verdict": compared.verdict(differences).value,
        "differences": differences,
        "latencies": latencies,
        "not_called": {
            function: why for function, why in surveys.NOT_CALLED.items() if function not in called
        },
        "course": [each.to_data() for each in course.result.stages] if course else None,
        "library": library,
        "gpus": captured,
    }


def summary(answer: "captures.Acceptance", path: pathlib.Path, style: styles.Style) -> str:
    """Return verdict, differences and the slowest functions for people."""
    names: dict[str, int] = {}
    for gpu in answer["gpus"]:
        name = gpu["name"] or "unreachable"
        names[name] = names.get(name, 0) + 1
    tone, meaning = _VERDICTS[compared.Verdict(answer["verdict"])]
    gpus = ", ".join(f"{count} {name}" for name, count in names.items()) or "no GPU"
    origin = "simulated: " if answer["is_simulated"] else ""
    lines = [
        f"{origin}{gpus}; driver {answer['driver_version']}",
        f"verdict: {style.paint(answer['verdict'], tone)}: {meaning}",
        messages.count(len(answer["differences"]), "difference"),
    ]
    lines += [style.wrap(each, indent="  ", further="    ") for each in _notes(answer)]
    if answer["course"] is not None:
        counts = collections.Counter(each["outcome"] for each in answer["course"])
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        lines.append(f"course: {outcomes}")
    slowest = sorted(answer["latencies"], key=lambda each: -each["median_ms"])[:_SLOWEST]
    lines.append("slowest functions, median in ms:")
    lines += [f"  {each['median_ms']:9.3f}  {each['function']}" for each in slowest]
    lines.append(f"{path} has everything, without UUIDs, addresses and host names")
    return "\n".join(lines)


def _notes(answer: "captures.Acceptance") -> list[str]:
    """Return one text for each difference or fabric that several GPUs share."""
    notes = [
        (
            "NVML" if each["gpu"] is None else f"GPU {each['gpu']}",
            "{what}: {actual}, expected {expected}. {consequence}".format_map(each),
        )
        for each in answer["differences"]
    ]
    notes += [
        (f"GPU {number}", f"NVSwitch fabric completed. {fabric['consequence']}")
        for number, gpu in enumerate(answer["gpus"])
        if (fabric := gpu["fabric"]) and fabric["state"] == surveys.Fabric.COMPLETED.value
    ]
    groups: dict[str, list[str]] = {}
    for where, text in notes:
        groups.setdefault(text, []).append(where)
    return [f"{', '.join(where)}: {text}" for text, where in groups.items()]
