"""``mig-manager doctor``: check this node, change nothing, and say what to fix."""

import functools
import pathlib
import textwrap
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.adapters import host, pod_resources
from mig_manager.adapters.host import procfs
from mig_manager.adapters.kubernetes import api, node, pods
from mig_manager.adapters.nvml import client as nvml_worker
from mig_manager.cli import command_settings, console
from mig_manager.cli.doctor import checks, machine
from mig_manager.cli.doctor import cluster as cluster_checks
from mig_manager.core import bar, messages, picture
from mig_manager.core.node import cluster

_MARGIN_S = 3.0
"""For a check to start a process, and to kill one that hangs, beyond its time-out."""
_ATTEMPTS = 3
"""How often a request to the API may be sent within a check's time, pauses included."""
_MOUNTS = pathlib.Path("/proc/self/mountinfo")
CHECKS = (*machine.CHECKS, *cluster_checks.CHECKS)


def run(chosen: command_settings.DoctorSettings, terminal: console.Console) -> bool:
    """Check this node and write what was found.

    Returns:
        Whether nothing fails.
    """
    report = examine(chosen)
    terminal.answer(
        chosen.output_format.value,
        report.to_data,
        lambda: table(report, style=terminal.style(chosen.colour)),
    )
    return report.is_good


def examine(chosen: command_settings.DoctorSettings) -> checks.Report:
    """Run all checks."""
    return checks.run(CHECKS, facts(chosen), timeout_s=chosen.timeout_s + _MARGIN_S)


def table(report: checks.Report, *, style: bar.Style) -> str:
    """Return the findings for people, each problem with its remedy below."""
    wide = max(len(check.name) for check in CHECKS)
    lines = [f"{'CHECK':<{wide}}  VERDICT  FOUND"]
    for finding in report.findings:
        verdict = style.paint(f"{finding.verdict.value:<7}", _TONES[finding.verdict])
        margin = " " * (wide + 11)
        parts = [finding.found] + ([f"remedy: {finding.remedy}"] if finding.remedy else [])
        texts = [row for part in parts for row in _wrapped(part, picture.WIDTH - len(margin))]
        lines.append(f"{finding.check.name:<{wide}}  {verdict}  {texts[0]}")
        lines += [f"{margin}{text}" for text in texts[1:]]
    counts = [
        f"{report.count(verdict)} {verdict.value}"
        for verdict in checks.Verdict
        if report.count(verdict)
    ]
    return "\n".join([*lines, "", ", ".join(counts)])


_TONES: Mapping[checks.Verdict, bar.Tone] = {
    checks.Verdict.OK: bar.Tone.GOOD,
    checks.Verdict.WARN: bar.Tone.WARN,
    checks.Verdict.FAIL: bar.Tone.BAD,
    checks.Verdict.SKIPPED: bar.Tone.FAINT,
}


def _wrapped(text: str, width: int) -> list[str]:
    # Names from the API and from processes end up here; they must not drive the terminal.
    harmless = messages.printable(text, " ")
    return textwrap.wrap(
        harmless,
        width,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def facts(chosen: command_settings.DoctorSettings) -> checks.Facts:
    """Prepare the facts that checks read; nothing is read yet."""
    kube = checks.Once(functools.partial(_connect, chosen), what="the cluster")
    return checks.Facts(
        settings=chosen,
        gpus=checks.Once(lambda: _worker(chosen).observe(), what="the GPUs"),
        inspection=checks.Once(lambda: _worker(chosen).inspect(), what="the GPU processes"),
        kube=kube,
        node=checks.Once(functools.partial(_node, chosen, kube), what="the node"),
        pods=checks.Once(functools.partial(_pods, chosen, kube), what="the pods of the node"),
        allocatable=checks.Once(
            functools.partial(_allocatable, chosen), what="the devices that kubelet can schedule"
        ),
        own_pod_uid=procfs.own_pod_uid(chosen.own_pod_uid, _MOUNTS),
    )


def _worker(chosen: command_settings.DoctorSettings) -> nvml_worker.WorkerGpus:
    state = chosen.gpus.simulate_state
    command = nvml_worker.worker_command(
        library_path=chosen.gpus.library_path,
        driver_roots=chosen.gpus.driver_roots,
        simulate_state=str(state) if state else None,
        proc_root=str(chosen.proc) if chosen.proc else None,
    )
    return nvml_worker.WorkerGpus(command=command, timeout_s=chosen.timeout_s)


def _connect(chosen: command_settings.DoctorSettings) -> api.KubeApi:
    path = str(chosen.kubeconfig) if chosen.kubeconfig else None
    try:
        return api.KubeApi.connect(kubeconfig=path, request_timeout_s=chosen.timeout_s / _ATTEMPTS)
    except errors.UsageError as error:
        if chosen.has_cluster:
            raise
        raise checks.NotAskedError("no kubeconfig") from error


def _node(
    chosen: command_settings.DoctorSettings, kube: checks.Once[api.KubeApi]
) -> cluster.NodeView:
    connected = kube.needed()
    if not chosen.node_name:
        raise checks.NotAskedError("no --node-name")
    return node.KubeNode(connected, name=chosen.node_name, clock=host.SystemClock()).read()


def _pods(
    chosen: command_settings.DoctorSettings, kube: checks.Once[api.KubeApi]
) -> tuple[cluster.Pod, ...]:
    connected = kube.needed()
    if not chosen.node_name:
        raise checks.NotAskedError("no --node-name")
    return pods.KubeWorkloads(connected, node_name=chosen.node_name).list()


def _allocatable(chosen: command_settings.DoctorSettings) -> Mapping[str, frozenset[str]]:
    is_required = chosen.has_kubelet or (chosen.has_cluster and not chosen.gpus.is_simulated)
    if not is_required and not chosen.pod_resources_socket.parent.is_dir():
        raise checks.NotAskedError(
            f"no kubelet: {chosen.pod_resources_socket.parent} does not exist"
        )
    socket = pod_resources.PodResources(
        str(chosen.pod_resources_socket), timeout_s=chosen.timeout_s
    )
    return socket.allocatable()
