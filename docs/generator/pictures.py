"""Pictures of the programs: each is run, and what it writes is drawn."""

import collections
import html
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence

from docs.generator import terminal
from mig_manager.adapters.host import process
from mig_manager.catalogue import hardware
from mig_manager.core import timestamps
from mig_manager.core.display import styles
from mig_manager.core.fleet import fleet_nodes, node_reports, overview
from mig_manager.core.layout import available_layouts, layout_parser
from mig_manager.core.objects import pod_object, pod_parser, well_known
from mig_manager.core.records import inventory_codec

_TIME = re.compile(r"\d+\.\d\d s")
_PENDING = re.compile(r"(pending): .*")
_LINE_NUMBER = re.compile(r"(\.yaml):\d+")  # any edit of the built-in layouts would change it
_POD_SUFFIX = re.compile(r"(daemonset)-[0-9a-z]{5}\b")
_ALIKE = "8xA100-SXM4-40GB"
_MIXED = "4xA100-SXM4-40GB+2xA30"
_AT = "2026-11-24T12:00:00Z"


def _run(*arguments: str, home: str, **environ: str) -> list[str]:
    done = subprocess.run(  # noqa: S603 - our own program and our own arguments
        [sys.executable, "-m", "mig_manager", *arguments],
        env={
            "HOME": home,
            # Where our programs are, so that the demo says nothing about the path.
            "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.defpath)),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUTF8": "1",
            **environ,
        },
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"mig-manager {' '.join(arguments)}: {done.stderr}")
    return done.stdout.rstrip("\n").split("\n")


def _prompt(command: str) -> str:
    return f"\x1b[2m$\x1b[0m \x1b[1m{command}\x1b[0m"


def status() -> str:
    """Return the picture of ``status`` on a simulated node."""
    with tempfile.TemporaryDirectory() as home:
        simulated = ("--simulate", _MIXED, "--color", "always")
        _run("apply", "all-balanced", *simulated, home=home)
        lines = _run("status", *simulated, home=home)
    return terminal.draw(
        [_prompt("mig-manager status"), *lines],
        title="mig-manager status: the slices of each GPU to scale, with their instances",
    )


def plan() -> str:
    """Return the picture of ``plan`` on a simulated node."""
    with tempfile.TemporaryDirectory() as home:
        simulated = ("--simulate", _ALIKE, "--color", "always")
        _run("apply", "all-balanced", *simulated, home=home)
        lines = _run("plan", "all-1g.5gb", *simulated, home=home)
    lines = [_LINE_NUMBER.sub(r"\1", line) for line in lines]
    return terminal.draw(
        [_prompt("mig-manager plan all-1g.5gb"), *lines],
        title="mig-manager plan: which instances are destroyed, created and kept",
    )


def top() -> str:
    """Return the picture of ``kubectl mig top`` on four nodes."""
    product = hardware.find("A100-SXM4-40GB")
    idle = [hardware.template(product, index) for index in range(4)]
    text = process.packaged_config().read_text(encoding="utf-8")
    document = layout_parser.parse(text, source="config.yaml")

    def node(
        name: str, layout: str, requested: str = "", **run_status: str
    ) -> node_reports.NodeReport:
        (fit,) = available_layouts.fitting([document.layout(layout)], idle)
        run = {"config": requested or layout, "phase": "Done", "startedAt": _AT, **run_status}
        item = {
            "metadata": {
                "name": name,
                "uid": name,
                "labels": {
                    well_known.CONFIG_LABEL: requested or layout,
                    well_known.APPLIED_LABEL: layout,
                },
                "annotations": {
                    well_known.GPUS_ANNOTATION: inventory_codec.to_json(fit.gpus),
                    well_known.STATUS_ANNOTATION: json.dumps(run),
                },
            },
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
        now = timestamps.parse(_AT)
        assert now is not None  # noqa: S101 - our own
        return node_reports.of(fleet_nodes.parse(item), now)

    def pods(node: str, profile: str, count: int) -> list[pod_object.Pod]:
        container = {"name": "c", "resources": {"limits": {f"nvidia.com/{profile}": "1"}}}
        return [
            pod_parser.parse(
                {
                    "metadata": {"name": f"{profile}-{i}", "namespace": "ml", "uid": f"{i}"},
                    "spec": {"nodeName": node, "containers": [container]},
                }
            )
            for i in range(count)
        ]

    drain = {"phase": "Drain", "message": "1 pod to evict: ml/train-0"}
    refused = {"reason": "DrainTimeout", "message": "PodDisruptionBudget keep-all allows none"}
    shown = overview.Overview(
        reports=[
            node("gpu-1", "all-balanced", state="success"),
            node("gpu-2", "all-balanced", "all-1g.5gb", state="pending", **drain),
            node("gpu-3", "all-3g.20gb", "all-balanced", state="failed", **refused),
            node("gpu-4", "all-1g.5gb", state="success"),
        ],
        pods=[
            *pods("gpu-1", "mig-3g.20gb", 4),
            *pods("gpu-1", "mig-1g.5gb", 4),
            *pods("gpu-2", "mig-2g.10gb", 1),
            *pods("gpu-3", "mig-3g.20gb", 8),
            *pods("gpu-4", "mig-1g.5gb", 12),
            *pods("", "mig-7g.40gb", 2),
        ],
    )
    style = styles.Style(colour=True, columns=100)
    lines = overview.draw(shown, style=style, selected="gpu-2")
    return terminal.draw(
        [_prompt("kubectl mig top"), *lines],
        title="kubectl mig top: the nodes of a cluster, their GPUs to scale, and what is in use",
    )


def demo_lines() -> list[str]:
    """Run the demonstration; return its timeline and its checks."""
    with tempfile.TemporaryDirectory() as home:
        return timeline(_run("demo", "--color", "always", home=home))


def timeline(lines: Sequence[str]) -> list[str]:
    """Return the timeline and the checks of what a demonstration has written."""
    return [line for line in lines if re.match(r" *\d+\.\d\d s  |✓ ", terminal.plain(line))]


def demo(lines: Sequence[str]) -> str:
    """Return the picture of a timeline."""
    return terminal.draw(
        [_prompt("mig-manager demo"), *lines],
        title="mig-manager demo: from the label to success, line by line with its time",
    )


def cluster_demo_lines() -> list[str]:
    """Run the demonstration of several nodes; return all that it writes."""
    with tempfile.TemporaryDirectory() as home:
        return _run("demo", "--nodes", "5", "--color", "always", home=home, COLUMNS="100")


def cluster_demo(lines: Sequence[str]) -> str:
    """Return the picture of the demonstration of several nodes."""
    return terminal.draw(
        [_prompt("mig-manager demo --nodes 5"), *lines],
        title="mig-manager demo --nodes 5: a rollout that a budget stops, its undo, and a node "
        "that is repartitioned for pending pods",
    )


def differences(picture: str, lines: Sequence[str]) -> list[str]:
    """Return the lines that only one of a picture and a timeline has.

    Times do not count, nor do the order and the steps that a node shows on its way: they depend on
    how fast the machine is.
    """
    drawn, printed = _mask(_description(picture)), _mask("\n".join(map(terminal.plain, lines)))
    return sorted([*(drawn - printed).elements(), *(printed - drawn).elements()])


def _description(picture: str) -> str:
    (text,) = re.findall(r"<desc>[^\n]*\n(.*?)</desc>", picture, re.DOTALL)
    return html.unescape(text)


def _mask(text: str) -> collections.Counter[str]:
    masked = _PENDING.sub(r"\1", _POD_SUFFIX.sub(r"\1-N", _TIME.sub("T", text)))
    return collections.Counter(" ".join(line.split()) for line in masked.splitlines())
