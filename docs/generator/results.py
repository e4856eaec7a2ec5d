"""Tables of what the matrices counted: the JSON that ``pytest --results docs/results`` writes."""

import collections
import json
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from docs.generator import blocks

FOLDER = pathlib.Path(__file__).parents[1] / "results"

Entry = Mapping[str, Any]
_WIDTH = 140
_NOTHING = "No run is kept in `docs/results`."


def entries(matrix: str) -> Sequence[Entry]:
    """Return the entries of a matrix; none where no run of it is kept."""
    path = FOLDER / f"{matrix.replace(' ', '-')}.json"
    records: Sequence[Entry] = json.loads(path.read_text("utf-8")) if path.exists() else ()
    return records


def _stamp(matrix: str) -> str:
    """Return the commit and the day of the published run."""
    runs: Mapping[str, Mapping[str, str]] = json.loads((FOLDER / "runs.json").read_text("utf-8"))
    return f"Counted at commit `{runs[matrix]['commit']}` on {runs[matrix]['date']}."


def kill_table(_body: str) -> str:
    """Return the strikes of the kill matrix: a row for each kind, and the phases in which."""
    records = entries("kill matrix")
    if not records:
        return _NOTHING
    kinds = dict.fromkeys(entry["what"] for entry in records)
    rows = (
        (kind, *_sums([entry for entry in records if entry["what"] == kind])) for kind in kinds
    )
    table = blocks.table(("Kill", "Changes", "Tried", "Struck", "Converged"), rows)
    return f"{table}\n\n{_kill_phases(records)}\n\n{_stamp('kill matrix')}"


def _sums(records: Sequence[Entry]) -> Iterable[str]:
    yield str(len(records))
    for key in ("tried", "struck", "converged"):
        yield str(sum(entry[key] for entry in records))


def _kill_phases(records: Iterable[Entry]) -> str:
    struck: collections.Counter[str] = collections.Counter()
    for entry in records:
        struck.update({name: counts["struck"] for name, counts in entry["phases"].items()})
    listed = ", ".join(f"`{name}` {struck[name]}" for name in sorted(struck))
    return textwrap.fill(f"Struck by the phase that the node was in: {listed}.", _WIDTH)


def double_table(_body: str) -> str:
    """Return what struck a change and then its recovery, a row for each change."""
    records = entries("double strikes")
    if not records:
        return _NOTHING
    keys = ("kills", "writes", "struck", "checked", "converged")
    rows = ((entry["change"], *(str(entry[key]) for key in keys)) for entry in records)
    head = ("Change", "Kills", "Writes", "Struck", "Checked", "Converged")
    return f"{blocks.table(head, rows)}\n\n{_stamp('double strikes')}"


_FAULTS = {
    "NVML faults": "an NVML call answers with an error",
    "API faults": "a request to the API server fails",
    "kubelet faults": "a call to kubelet fails",
}


def fault_table(_body: str) -> str:
    """Return the strikes of the fault matrices, a row for each."""
    rows: list[Sequence[str]] = []
    for matrix, what in _FAULTS.items():
        records = entries(matrix)
        if not records:
            rows.append((what, "", "", ""))
            continue
        sums = [str(sum(entry[key] for entry in records)) for key in ("tried", "struck")]
        rows.append((what, str(len(records)), *sums))
    return blocks.table(("Fault", "Variants", "Tried", "Struck"), rows)


_SOAK_ROWS = (
    *("seed", "nodes", "pods", "runs", "Applied", "AlreadyApplied", "kills", "reboots"),
    *("driver faults struck", "not undone, as reported"),
)


def soak_table(_body: str) -> str:
    """Return the main counts of one pass of the soak, and the seed that plays it again."""
    records = entries("soak")
    if not records:
        return _NOTHING
    rows = ((key, str(entry[key])) for entry in records for key in _SOAK_ROWS if key in entry)
    return blocks.table(("Count", "Number"), rows)


_VARIANTS = {
    "bound": "a bound that no scheduler can beat",
    "instant": "repartitioning that takes no time, computed",
    "on-demand": "**partitioner**",
    "best fixed": "the best fixed layout of each GPU, chosen by one who knows the day",
    "all-balanced": "`all-balanced`",
}


def day_table(_body: str) -> str:
    """Return how the pods of a day fared, a row for each way to partition the GPUs."""
    records = entries("partitioner-day")
    if not records:
        return _NOTHING
    about, *rows = records
    by_name = {row["variant"]: row for row in rows}
    waits = "Mean wait", "90 % at most", "95 % at most", "Longest"
    head = ("GPUs", "Pods placed", *waits, "Slices used", "Changes", "Requests for each pod")
    cells = (
        (what, *_figures(by_name[name], about))
        for name, what in _VARIANTS.items()
        if name in by_name
    )
    hour_s = about["day_s"] / 24
    return (
        f"{about['nodes']} nodes with 8 A100 each, {about['pods']} pods, seed {about['seed']}, "
        f"load {about['load']:.0%}. The day took {about['day_s']:g} s, an hour {hour_s:g} s.\n\n"
        f"{blocks.table(head, cells)}"
    )


def _figures(row: Entry, about: Entry) -> Iterable[str]:
    yield f"{row['placed']} of {about['pods']}"
    yield f"{row['mean_s']:.1f} s" if "mean_s" in row else ""
    for key in ("p90_s", "p95_s", "p100_s"):
        yield "not placed" if row[key] is None else f"{row[key]:.1f} s"
    yield f"{row['utilisation']:.0%}"
    if "runs" not in row:
        yield from ("", "")
        return
    refused = row["runs"].get("InUse", 0)
    changed = row["runs"].get("Applied", 0)
    yield f"{changed}, {refused} refused" if refused else str(changed)
    yield f"{row['partitioner_requests_per_pod'] + row['agents_requests_per_pod']:.1f}"


_MIXES = {
    "uniform": "1g, 2g, 3g and 7g alike",
    "small": "two thirds 1g, few 7g",
    "large": "three quarters 3g and 7g",
    "shift": "large by night, small by day",
    "multi": "a third with two devices each",
    "trace-compute": "as Alibaba's trace, by compute",
    "trace-memory": "as Alibaba's trace, by memory",
}


def load_table(_body: str) -> str:
    """Return the mean waits of simulated pods by load, a row for each mix and load."""
    records = entries("partitioner")
    if not records:
        return _NOTHING
    about, *cells = records
    head = (
        *("Pods", "Load", "Best fixed", "**Partitioner**", "Not prepared"),
        *("Default scheduler", "First-fit", "7g placed: fixed, partitioner, first-fit"),
    )
    rows = (tuple(_by_load(entry)) for entry in cells)
    return (
        f"Mean waits in seconds, with standard errors, of {about['seeds']} simulated hours each, "
        f"on 32 A100.\n\n{blocks.table(head, rows)}"
    )


def _by_load(entry: Entry) -> Iterable[str]:
    rows = entry["rows"]
    fixed, partitioner, first = (
        rows[name] for name in ("best fixed, packed", "ours, packed", "first-fit")
    )
    yield _MIXES[entry["mix"]]
    yield f"{entry['load']:.0%}"
    for row in (fixed, partitioner):
        yield f"{row['mean_s']:.1f} ± {row['error_s']:.1f}"
    for name in ("ours, not prepared, packed", "ours, spread"):
        yield f"{rows[name]['mean_s']:.1f}"
    yield f"{first['mean_s']:.1f}"
    yield ", ".join(f"{row['placed_7g']:.0%}" for row in (fixed, partitioner, first))


RENDERERS: Mapping[str, blocks.Renderer] = {
    "double-strikes": double_table,
    "fault-matrices": fault_table,
    "kill-matrix": kill_table,
    "partitioner-day": day_table,
    "partitioner-loads": load_table,
    "soak": soak_table,
}
"""By the name that a block has in its page."""
