"""Measure how long a rollout decides over many nodes, and the size of their annotations.

    python -m bench.rollout_scale [--nodes 10000]

The nodes are those of ``bench.partitioner_scale``. Ten percent change at once, and all of them
finish between two decisions. There is no API server.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import time
from typing import Any

from bench import partitioner_scale
from mig_manager.core.fleet import fleet_nodes, goals, marks, rollout
from mig_manager.core.layout import available_layouts, layout_list
from mig_manager.core.objects import well_known
from mig_manager.core.records import inventory_codec, run_status

_FORMER, _LAYOUT = "all-balanced", "all-1g.5gb"


def main() -> None:
    """Roll out, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1000, 10000])
    for count in parser.parse_args().nodes:
        print(json.dumps(measure(count)), flush=True)


def measure(count: int) -> dict[str, Any]:
    """Roll out to some nodes; return the figures."""
    objects = partitioner_scale.Objects(1, is_unequal=False)
    items = [objects.node(number) for number in range(count)]
    texts = [json.dumps(_with_status(item, _FORMER)) for item in items]
    began_s = time.process_time()
    fleet = {node.name: node for node in (fleet_nodes.parse(json.loads(text)) for text in texts)}
    read_s = time.process_time() - began_s
    applied = fleet_nodes.parse(_with_status(items[0], _LAYOUT))
    goal = goals.RolloutGoal(layout=_LAYOUT)
    decider = rollout.Rollout(goal, goals.RolloutLimits(max_unavailable="10%"))
    took_s: list[float] = []
    while True:
        began_s = time.process_time()
        decision = decider.decide(tuple(fleet.values()), float(len(took_s)))
        took_s.append(time.process_time() - began_s)
        if decision.phase.is_over:
            break
        for name in decision.start:
            decider.record_request(name)
            view = dataclasses.replace(applied.view, name=name)
            mark = marks.Mark(layout=_LAYOUT, before=_FORMER)
            fleet[name] = dataclasses.replace(applied, view=view, mark=mark)
    return {
        "nodes": count,
        "state": decision.phase.value,
        "decisions": len(took_s),
        "read_s": round(read_s, 2),
        "mean_s": round(statistics.fmean(took_s), 3),
        "longest_s": round(max(took_s), 3),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "annotation_bytes": _sizes(items[0]),
    }


def _with_status(item: partitioner_scale.Object, layout: str) -> partitioner_scale.Object:
    """Return a node whose agent has applied a layout."""
    metadata = item["metadata"]
    labels = {
        well_known.CONFIG_LABEL: layout,
        well_known.STATE_LABEL: run_status.State.SUCCESS.value,
        well_known.APPLIED_LABEL: layout,
    }
    status = json.dumps({"config": layout, "state": "success", "reason": "Applied"})
    annotations = {**metadata["annotations"], well_known.STATUS_ANNOTATION: status}
    metadata |= {"labels": {**metadata["labels"], **labels}, "annotations": annotations}
    return item


def _sizes(item: partitioner_scale.Object) -> dict[str, int]:
    """Return the sizes of the agents' largest annotations on one node."""
    annotations = item["metadata"]["annotations"]
    gpus = inventory_codec.from_json(annotations[well_known.GPUS_ANNOTATION])
    entries = [*map(layout_list.Entry.of, available_layouts.generate(gpus).values())]
    annotations[well_known.LAYOUTS_ANNOTATION] = layout_list.to_json(entries, takes_custom=True)
    return {name: len(text) for name, text in annotations.items()}


if __name__ == "__main__":
    main()
