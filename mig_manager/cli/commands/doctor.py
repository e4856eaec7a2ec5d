"""``mig-manager doctor``: check this node, change nothing, and say what to fix."""

from mig_manager.cli.doctor import doctor_settings
from mig_manager.cli.toolkit import console
from mig_manager.core.settings import node_settings

ABOUT = """
Checks the driver, GPUs, leftovers, rights, files and services and, with credentials, the
cluster. It changes nothing.

$ mig-manager doctor
All checks, with a remedy for every problem.

$ mig-manager doctor -o json
The same as JSON.

exit 0: OK

exit 1: problem found
"""
Settings = doctor_settings.DoctorSettings


def run(settings: Settings, terminal: console.Console) -> int:
    """Check this node and write the findings; the exit status is 0 if no check fails."""
    from mig_manager.cli import gpu_access
    from mig_manager.cli.doctor import doctor_facts, doctor_report, examination

    terminal.configure_log(node_settings.LogLevel.ERROR, is_debug=settings.is_debug)
    gpu_access.prepare_simulation(settings.gpus, terminal.note)
    report = examination.examine(
        examination.CHECKS,
        doctor_facts.facts(settings, terminal.replace_adapter),
        timeout_s=settings.timeout_s + examination.MARGIN_S,
    )
    return terminal.answer(
        settings.output_format,
        report.to_data,
        lambda: doctor_report.table(report, style=terminal.style(settings.colour)),
        is_good=report.is_good,
    )
