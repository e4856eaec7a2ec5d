"""The content of a support bundle: one archive for a person on call to attach to a report.

Every source has its own thread; all have one deadline. If a source fails, only its file is
missing, and the manifest has the reason. Everything is redacted before it is written.
"""

import contextlib
import datetime as dt
import gzip
import io
import json
import pathlib
import platform
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.adapters.host import call_thread, files, journald, programs
from mig_manager.adapters.kubernetes import api, report
from mig_manager.agent import agent_settings
from mig_manager.cli import registry
from mig_manager.cli.doctor import doctor_facts, doctor_report, doctor_settings, examination
from mig_manager.cli.support_bundle import redaction
from mig_manager.cli.toolkit import console, gpu_text, parser
from mig_manager.core import gpu_processes
from mig_manager.core.answers import gpu_answers
from mig_manager.core.display import styles
from mig_manager.core.settings import host_settings, options

MANIFEST = "manifest.json"
_MAX_BYTES = 4 << 20  # a longer file keeps its end
_MARGIN_S = 5.0
"""Extra time for doctor to end a check that hangs: its checks have the same time-out."""
_PLAIN = styles.Style()
_VARIABLES = pathlib.Path("/etc/mig-manager/mig-manager.env")  # variables of our units

_Read = Callable[[], str]


def collect(
    node: doctor_settings.DoctorSettings,
    roots: host_settings.HostRoots,
    terminal: console.Console,
    *,
    now: dt.datetime,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the redacted files, the manifest first, and why others are missing."""
    timeout_s = node.timeout_s + 2 * _MARGIN_S
    deadline_s = time.monotonic() + timeout_s
    secrets = _secrets(node, terminal.environ)
    threads = {
        name: call_thread.CallThread(read)
        for name, read in _sources(node, roots, terminal).items()
    }
    members: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, thread in threads.items():
        try:
            text = thread.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            missing[name] = f"no answer within {timeout_s:g} s"
        except errors.MigManagerError as error:
            missing[name] = redaction.redact(error.message, secrets)
        except doctor_facts.SkippedError as error:
            missing[name] = str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other sources go on
            why = f"{type(error).__name__}: {error}"
            missing[name] = redaction.redact(why, secrets)
        else:
            clean = redaction.redact(text, secrets).encode(errors="backslashreplace")
            members[name] = clean[-_MAX_BYTES:].decode(errors="ignore")
            if len(clean) > _MAX_BYTES:
                missing[f"the start of {name}"] = f"longer than {_MAX_BYTES >> 20} MiB"
    manifest = {
        "version": 1,
        "migManager": mig_manager.__version__,
        "collectedAt": now.isoformat(timespec="seconds"),
        "collectedOn": platform.node(),
        "node": node.node_name or None,
        "isSimulated": node.gpus.is_simulated,
        "files": {name: len(text.encode()) for name, text in members.items()},
        "missing": missing,
    }
    return {MANIFEST: _json(manifest), **members}, missing


def archive(members: Mapping[str, str], *, folder: str, now: dt.datetime) -> bytes:
    """Return a ``.tar.gz`` of these files in one folder."""
    packed = io.BytesIO()
    at_s = int(now.timestamp())
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=at_s) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for name, text in members.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            entry.mode = 0o600
            entry.mtime = at_s
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _sources(
    node: doctor_settings.DoctorSettings,
    roots: host_settings.HostRoots,
    terminal: console.Console,
) -> Mapping[str, _Read]:
    """Return the functions that read the files."""
    name = node.node_name
    checks_s = node.timeout_s + _MARGIN_S
    environ = terminal.environ
    facts = doctor_facts.facts(node, terminal.replace_adapter)
    diagnosis = doctor_facts.Once(
        lambda: examination.examine(examination.CHECKS, facts, timeout_s=checks_s),
        what="doctor",
    )
    agents = doctor_facts.Once(lambda: report.agents(kube(), name), what="the agent's pod")
    installed = programs.Programs(programs.roots(roots), search_path=environ.get("PATH", ""))
    journal, layout = node.journal_file, node.verified_layout_file

    def kube() -> api.KubeApi:
        connected = facts.kube.get()
        if not name:
            raise doctor_facts.SkippedError("no --node-name")
        return connected

    def pods() -> Sequence[report.Object]:
        if not (listed := agents.get()):
            raise doctor_facts.SkippedError(f"no pod of an agent on node {name}")
        return listed

    def processes() -> gpu_processes.Processes | None:
        inspection = facts.inspection.if_known()
        return dict(inspection.processes) if inspection else None

    def journal_of(selection: tuple[str, ...]) -> str:
        if node.gpus.is_simulated:
            raise doctor_facts.SkippedError("the GPUs are simulated")
        return journald.read(installed, selection, timeout_s=node.timeout_s)

    return {
        "versions.json": lambda: _json(_versions(facts)),
        "status.json": lambda: console.render_answer(
            gpu_answers.status(facts.gpus.get(), processes())
        ),
        "status.txt": lambda: gpu_text.status(
            facts.gpus.get(), processes(), is_wide=True, style=_PLAIN
        ),
        "doctor.json": lambda: console.render_answer(diagnosis.get().to_data()),
        "doctor.txt": lambda: doctor_report.table(diagnosis.get(), style=_PLAIN),
        "settings.json": lambda: _json(_settings(agents.if_known(), environ)),
        "layouts.yaml": files.SourceFile(node.config_file).read,
        "journal.json": lambda: _existing(files.JournalFile(journal).read, journal),
        "verified-layout.json": lambda: _existing(files.VerifiedLayoutFile(layout).read, layout),
        "node.json": lambda: _json(report.of_node(kube(), name)),
        "events.json": lambda: _json(report.events(kube(), name)),
        "agent.json": lambda: _json(report.of_agents(pods())),
        "agent.log": lambda: report.logs(kube(), pods()),
        "agent-previous.log": lambda: report.logs(kube(), pods(), previous="true"),
        "agent-layouts.yaml": lambda: report.layout_file(kube(), pods()),
        "units.log": lambda: journal_of(journald.OF_UNITS),
        "kernel.log": lambda: journal_of(journald.OF_DRIVER),
    }


def _versions(facts: doctor_facts.Facts) -> dict[str, object]:
    driver = facts.inspection.if_known()
    server = None
    if kube := facts.kube.if_known():
        with contextlib.suppress(errors.ClusterError):
            server = kube.get("/version").get("gitVersion")
    return {
        "migManager": mig_manager.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "driver": driver.driver_version if driver else None,
        "nvml": driver.nvml_version if driver else None,
        "kubernetes": server,
    }


def _settings(
    pods: Sequence[report.Object] | None, environ: Mapping[str, str]
) -> dict[str, object]:
    """Return the agent's options with value and origin, from its pod or else this machine."""
    parsed: Mapping[str, object] = {}
    place = "the variables here"
    variables = {**_unit_variables(), **environ}
    if pods:
        words, variables = report.command(pods)
        after = words[words.index("agent") + 1 :] if "agent" in words else words
        place = "the agent's pod"
        parsed = parser.parse(registry.PROGRAM, ["agent", *after])
    source = options.Source(parsed, variables)
    return {
        "readFrom": place,
        "options": {
            each.name: dict(zip(("value", "origin"), source.effective(each), strict=True))
            for each in options.of(agent_settings.AgentSettings)
        },
    }


def _unit_variables() -> dict[str, str]:
    try:
        lines = files.SourceFile(_VARIABLES).read().splitlines()
    except errors.ConfigError:
        return {}
    pairs = (line.partition("=") for line in lines)
    return {name: value.strip("\"'") for name, _, value in pairs}


def _existing(read: Callable[[], str | None], path: pathlib.Path) -> str:
    text = read()
    if text is None:
        raise doctor_facts.SkippedError(f"{path} does not exist")
    return text


def _secrets(node: doctor_settings.DoctorSettings, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets of the kubeconfig, and of variables whose names suggest a secret."""
    secrets = [value for name, value in environ.items() if redaction.is_secret(name)]
    if node.kubeconfig:
        with contextlib.suppress(errors.ConfigError):
            secrets += redaction.values(files.SourceFile(node.kubeconfig).read())
    return tuple(secrets)


def _json(data: object) -> str:
    return json.dumps(data, indent=2) + "\n"
