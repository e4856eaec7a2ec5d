"""``mig-manager support-bundle``."""

import dataclasses
import pathlib
from typing import Any

from mig_manager import errors
from mig_manager.cli.doctor import doctor_settings
from mig_manager.cli.toolkit import command_settings, console
from mig_manager.core import messages
from mig_manager.core.settings import host_settings, node_settings, options

ABOUT = """
It has versions, status, doctor's report, settings, layouts, journal and logs; with
credentials also the node's labels, annotations and Events, and its agent's log. Every
source has a deadline; manifest.json lists what is missing, and why. Everything that is
named or looks like a credential is removed, but some may be missed: review the archive
before you share it. Other programs' variables, labels and annotations are not read;
names of nodes, pods and processes stay. It changes nothing.

$ mig-manager support-bundle
On the node, as root.

$ mig-manager support-bundle -n node-1
From elsewhere, with your kubeconfig: what the agent has published, and its log.

$ mig-manager support-bundle --output-file - > bundle.tar.gz
In the agent's pod, with 'kubectl exec': uses its rights and leaves no file there.

exit 0: the archive is written, even if it is incomplete
"""


class Settings(command_settings.TerminalSettings):
    """Settings of ``support-bundle``."""

    output_file: pathlib.Path | None = options.path(
        "archive to write, '-' for standard output",
        default_text="mig-manager-support-NODE-TIME.tar.gz in this folder",
    )
    doctor: doctor_settings.DoctorSettings = options.declare_from(
        tuple(
            each
            for each in options.of(doctor_settings.DoctorSettings)
            if each.group != command_settings.OUTPUT
        )
    )
    roots: host_settings.HostRoots  # where the machine's programs are

    @classmethod
    def values(cls, source: options.Source) -> dict[str, Any]:
        """Return the values of all fields."""
        environ = source.environ
        doctor = doctor_settings.DoctorSettings.read(source.parsed, environ)
        home = environ.get("HOME")
        is_in_pod = "KUBERNETES_SERVICE_HOST" in environ
        if doctor.node_name and doctor.kubeconfig is None and home and not is_in_pod:
            usual = pathlib.Path(home) / ".kube" / "config"
            doctor = dataclasses.replace(doctor, kubeconfig=usual)
        roots = host_settings.host_roots(source)
        return super().values(source) | {"doctor": doctor, "roots": roots}


def run(settings: Settings, terminal: console.Console) -> int:
    """Collect the files, write the archive, and summarize it.

    Raises:
        UsageError: The archive cannot be written, or would be written to a terminal.
    """
    import datetime as dt
    import platform

    from mig_manager.adapters.host import files
    from mig_manager.cli import gpu_access
    from mig_manager.cli.support_bundle import bundle_content

    terminal.configure_log(node_settings.LogLevel.ERROR, is_debug=settings.is_debug)
    gpu_access.prepare_simulation(settings.doctor.gpus, terminal.note)
    if settings.output_file == console.STANDARD_OUTPUT and terminal.stdout.isatty():
        raise errors.UsageError("the archive is not for a terminal: redirect it to a file")
    now = dt.datetime.now(tz=dt.UTC)
    # The name is not validated: a slash would name another folder.
    node = messages.printable(settings.doctor.node_name or platform.node(), "_").replace("/", "_")
    name = f"mig-manager-support-{node}-{now:%Y%m%dT%H%M%SZ}"
    members, missing = bundle_content.collect(settings.doctor, settings.roots, terminal, now=now)
    content = bundle_content.archive(members, folder=name, now=now)
    path = settings.output_file or pathlib.Path(f"{name}.tar.gz")
    is_written = path == console.STANDARD_OUTPUT
    if is_written:
        terminal.write(content)
    else:
        files.write_output(path, content, mode=0o600)
    where = "standard output" if is_written else path
    lines = [f"{where}: {len(members)} files, {len(content) / 1024:.0f} KiB"]
    if missing:
        lines.append(f"not in it: {messages.by_cause(missing.items())}")
    lines.append("It names nodes and pods. Review it before you share it.")
    style = terminal.style(settings.colour)
    for line in lines:
        if is_written:
            terminal.note(line)
        else:
            terminal.say(style.wrap(line))
    return console.DONE
