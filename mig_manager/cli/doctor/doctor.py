"""``mig-manager doctor``: look at a node from all sides, change nothing, say what to fix."""

import functools
import json
import pathlib
import textwrap
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.adapters.host import clock, procfs
from mig_manager.adapters.kubelet import pod_resources
from mig_manager.adapters.kubernetes import api, node, pods
from mig_manager.adapters.nvml_worker import client as nvml_worker
from mig_manager.cli import command_settings, console
from mig_manager.cli.doctor import cluster as cluster_checks
from mig_manager.cli.doctor import findings, machine
from mig_manager.cli.doctor import gpus as gpu_checks
from mig_manager.core import bar, messages, picture, yaml_tree
from mig_manager.core.node import cluster

_MARGIN_S = 3.0
"""What a check may take beyond what it asks: to end a process that does not answer, and start."""
_ATTEMPTS = 3
"""How often a request to the API may be sent within a check's time, pauses included."""
_MOUNTS = pathlib.Path("/proc/self/mountinfo")
_SIMULATED = "the GPUs are simulated"


def run(given: command_settings.DoctorSettings, terminal: console.Console) -> bool:
    """Check this node and write what was found.

    Returns:
        Whether nothing fails.
    """
    report = examine(given)
    match given.output_format:
        case command_settings.OutputFormat.JSON:
            terminal.say(json.dumps(report.to_data(), indent=2))
        case command_settings.OutputFormat.YAML:
            terminal.say(yaml_tree.dump(report.to_data()))
        case command_settings.OutputFormat.TEXT | command_settings.OutputFormat.WIDE:
            terminal.say(table(report, style=terminal.style(given.colour)))
    return report.is_good


def examine(given: command_settings.DoctorSettings) -> findings.Report:
    """Look at everything at once, each check on its own and with a deadline."""
    return findings.run(_looks(given), timeout_s=given.timeout_s + _MARGIN_S)


def table(report: findings.Report, *, style: bar.Style) -> str:
    """Return what was found, for people: what is not well with its remedy below."""
    wide = max(len(check.value) for check in findings.Check)
    lines = [f"{'CHECK':<{wide}}  VERDICT  FOUND"]
    for finding in report.findings:
        verdict = style.paint(f"{finding.verdict.value:<7}", _TONES[finding.verdict])
        margin = " " * (wide + 11)
        parts = [finding.found] + ([f"remedy: {finding.remedy}"] if finding.remedy else [])
        texts = [row for part in parts for row in _wrapped(part, picture.WIDTH - len(margin))]
        lines.append(f"{finding.check.value:<{wide}}  {verdict}  {texts[0]}")
        lines += [f"{margin}{text}" for text in texts[1:]]
    counts = [
        f"{report.count(verdict)} {verdict.value}"
        for verdict in findings.Verdict
        if report.count(verdict)
    ]
    return "\n".join([*lines, "", ", ".join(counts)])


_TONES: Mapping[findings.Verdict, bar.Tone] = {
    findings.Verdict.OK: bar.Tone.GOOD,
    findings.Verdict.WARN: bar.Tone.WARN,
    findings.Verdict.FAIL: bar.Tone.BAD,
    findings.Verdict.SKIPPED: bar.Tone.FAINT,
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


def _looks(given: command_settings.DoctorSettings) -> Mapping[findings.Check, findings.Look]:
    gpus = findings.Once(lambda: _worker(given).observe(), what="what the GPUs have")
    return {
        **_gpu_looks(given, gpus),
        **_machine_looks(given, gpus),
        **_cluster_looks(given, gpus),
    }


def _gpu_looks(
    given: command_settings.DoctorSettings, gpus: gpu_checks.Gpus
) -> Mapping[findings.Check, findings.Look]:
    inspection = findings.Once(lambda: _worker(given).inspect(), what="who holds the GPUs")
    return {
        findings.Check.DRIVER: functools.partial(gpu_checks.driver, inspection),
        findings.Check.GPUS: functools.partial(gpu_checks.modes, gpus),
        findings.Check.VIRTUALIZATION: functools.partial(gpu_checks.virtualization, gpus),
        findings.Check.INSTANCES: functools.partial(gpu_checks.instances, gpus),
        findings.Check.HOLDERS: functools.partial(gpu_checks.holders, gpus, inspection),
    }


def _worker(given: command_settings.DoctorSettings) -> nvml_worker.WorkerGpus:
    state = given.gpus.simulate_state
    command = nvml_worker.worker_command(
        library_path=given.gpus.library_path,
        driver_roots=given.gpus.driver_roots,
        simulate_state=str(state) if state else None,
        proc_root=str(given.proc) if given.proc else None,
    )
    return nvml_worker.WorkerGpus(command=command, timeout_s=given.timeout_s)


def _machine_looks(
    given: command_settings.DoctorSettings, gpus: gpu_checks.Gpus
) -> Mapping[findings.Check, findings.Look]:
    files: Mapping[findings.Check, findings.Look] = {
        findings.Check.LOCK: functools.partial(machine.lock, given.lock_file),
        findings.Check.CONFIG_FILE: functools.partial(
            machine.config_file, given.config_file, is_lenient=given.is_lenient
        ),
        findings.Check.PROVEN_FILE: functools.partial(machine.proven_file, given.proven_file),
        findings.Check.JOURNAL_FILE: functools.partial(machine.journal_file, given.journal_file),
    }
    if given.proc is None:
        return {
            findings.Check.PRIVILEGES: _simulated,
            findings.Check.MIG_CONFIG_RIGHT: _simulated,
            findings.Check.KERNEL_MODULES: _simulated,
            **files,
        }
    return {
        findings.Check.PRIVILEGES: functools.partial(machine.privileges, given.proc, given.dev),
        findings.Check.MIG_CONFIG_RIGHT: functools.partial(
            machine.mig_config_right, given.proc, given.dev
        ),
        findings.Check.KERNEL_MODULES: functools.partial(machine.kernel_modules, given.proc, gpus),
        **files,
    }


def _simulated() -> tuple[findings.Found, ...]:
    return (findings.skipped(_SIMULATED),)


def _cluster_looks(
    given: command_settings.DoctorSettings, gpus: gpu_checks.Gpus
) -> Mapping[findings.Check, findings.Look]:
    kube = findings.Once(functools.partial(_connect, given), what="the cluster")
    view = findings.Once(functools.partial(_node, given, kube), what="the node")
    listed = findings.Once(functools.partial(_pods, given, kube), what="the pods of the node")
    offers = findings.Once(functools.partial(_offers, given), what="what kubelet offers")
    uid = procfs.own_pod_uid(given.own_pod_uid, _MOUNTS)
    name = given.node_name
    return {
        findings.Check.POD_RESOURCES: functools.partial(cluster_checks.pod_resources, offers),
        findings.Check.OFFERED_DEVICES: functools.partial(
            cluster_checks.offered_devices, offers, gpus, view
        ),
        findings.Check.API: functools.partial(cluster_checks.connection, kube, view, name),
        findings.Check.RIGHTS: functools.partial(cluster_checks.own_rights, kube, name),
        findings.Check.DEVICE_PLUGIN: functools.partial(cluster_checks.device_plugin, listed),
        findings.Check.INTERRUPTED_RUN: functools.partial(cluster_checks.interrupted_run, view),
        findings.Check.FOREIGN_MANAGERS: functools.partial(
            cluster_checks.foreign_managers, listed, uid
        ),
    }


def _connect(given: command_settings.DoctorSettings) -> api.KubeApi:
    path = str(given.kubeconfig) if given.kubeconfig else None
    try:
        return api.KubeApi.connect(kubeconfig=path, request_timeout_s=given.timeout_s / _ATTEMPTS)
    except errors.UsageError as error:
        if given.has_cluster:
            raise
        raise findings.NotAskedError("no kubeconfig") from error


def _node(given: command_settings.DoctorSettings, kube: cluster_checks.Api) -> cluster.NodeView:
    connected = kube.needed()
    if not given.node_name:
        raise findings.NotAskedError("no --node-name")
    return node.KubeNode(connected, name=given.node_name, clock=clock.SystemClock()).read()


def _pods(
    given: command_settings.DoctorSettings, kube: cluster_checks.Api
) -> tuple[cluster.Pod, ...]:
    connected = kube.needed()
    if not given.node_name:
        raise findings.NotAskedError("no --node-name")
    return pods.KubeWorkloads(connected, node_name=given.node_name).list()


def _offers(given: command_settings.DoctorSettings) -> Mapping[str, frozenset[str]]:
    is_wanted = given.has_kubelet or (given.has_cluster and not given.gpus.is_simulated)
    if not is_wanted and not given.pod_resources_socket.parent.is_dir():
        raise findings.NotAskedError(
            f"no kubelet: there is no {given.pod_resources_socket.parent}"
        )
    socket = pod_resources.PodResources(str(given.pod_resources_socket), timeout_s=given.timeout_s)
    return socket.allocatable()
