"""Compose a command or the agent from a command line; return its exit status.

Slow imports stand inside the function that needs them, so that ``--help`` loads no YAML, and a
command at a shell neither Kubernetes nor gRPC.
"""
# ruff: noqa: PLC0415 - see above

from collections.abc import Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.adapters.host import log, process
from mig_manager.agent import settings
from mig_manager.cli.toolkit import console, parser
from mig_manager.core import node_settings

_MIG_PARTED = "nvidia-mig-parted"
_READING = frozenset({"status", "plan"})
_EXAMPLE = "1xA100-SXM4-40GB"
_MOST_BYTES = 1 << 30  # of a file with the objects of a cluster
_WARNING_OF_VARIABLES = frozenset(parser.COMMANDS) - {
    "agent",
    "completion",
    "help",
    "schema",
    "version",
}
"""The agent logs its warning."""
_MOST_BYTES = 1 << 30  # of a file with the objects of a cluster


def main(argv: Sequence[str], terminal: console.Console, *, program: str = parser.PROGRAM) -> int:
    """Run one command line, as the program that was called by this name.

    Returns:
        The exit status: 0 done, 1 not applied or failed, 2 unusable input, 3 unknown command.
        As ``nvidia-mig-parted``, which has no 2, 1 instead of 2.
    """
    status = terminal.exit_status(
        lambda: _run(argv, terminal),
        remedy=lambda error: _remedy(error, argv),
        bug_remedy="This is a bug in mig-manager; please report it, with what --debug shows.",
        has_traceback=not {"-d", "--debug"}.isdisjoint(argv),
        priority=log.Priority.ERROR,
    )
    is_parted = program == _MIG_PARTED and status == console.UNUSABLE
    return console.FAILED if is_parted else status


def _remedy(error: errors.MigManagerError, argv: Sequence[str]) -> str:
    usage = parser.usage_remedy(error, parser.PROGRAM, argv, parser.COMMANDS)
    remedy = error.own_remedy or usage or error.reason.remedy_at_shell
    if error.reason is errors.Reason.DRIVER_NOT_LOADED and not _READING.isdisjoint(argv[:1]):
        remedy += f" To try it without a GPU, add --simulate {_EXAMPLE}."
    return remedy


def _run(argv: Sequence[str], terminal: console.Console) -> int:
    parsed = terminal.parsed(lambda: parser.parse(argv))
    if parsed is None:
        return console.DONE
    if parsed["command"] in _WARNING_OF_VARIABLES:
        for name, closest in parser.unknown_variables(terminal.environ).items():
            hint = f"; did you mean {closest}?" if closest else ""
            terminal.note(f"warning: {name} is ignored: no option has this variable{hint}")
    match parsed["command"]:
        case None:
            terminal.say(parser.build().format_help())
            return console.DONE
        case "version":
            terminal.say(f"mig-manager {mig_manager.__version__}")
            return console.DONE
        case "schema":
            terminal.say(_schema(parsed["schema"]))
            return console.DONE
        case "completion":
            from mig_manager.cli.toolkit import completion

            terminal.say(completion.answer(parsed, terminal.environ))
            return console.DONE
        case command:
            return _RUNNERS.get(str(command), _on_gpus)(parsed, terminal)


def _schema(name: object) -> str:
    """Return a JSON Schema; the names of all without a name."""
    known = parser.SCHEMA.words
    if name is None:
        return "\n".join(known)
    if name not in known:
        from mig_manager.core import fields

        raise errors.UsageError(
            f"there is no schema {name!r}{fields.did_you_mean(str(name), known)}"
        )
    import pkgutil

    try:
        return (pkgutil.get_data("mig_manager", f"schemas/{name}.json") or b"").decode()
    except FileNotFoundError as error:
        raise errors.UsageError(
            "this source has no schemas: an installation makes them", remedy="pip install -e ."
        ) from error


def _on_gpus(parsed: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.cli.commands import gpus
    from mig_manager.cli.commands import settings as command_settings

    chosen = command_settings.command_settings(parsed, terminal.environ)
    _configure_log(terminal, node_settings.LogLevel.WARNING, is_debug=chosen.is_debug)
    return gpus.run(str(parsed["command"]), chosen, terminal)


def _agent(parsed: Mapping[str, object], terminal: console.Console) -> int:
    chosen = settings.agent_settings(parsed, terminal.environ)
    import structlog

    from mig_manager.adapters.host import procfs
    from mig_manager.agent import main

    is_json = chosen.log_format is node_settings.LogFormat.JSON
    _configure_log(terminal, chosen.log_level, is_debug=chosen.is_debug, is_json=is_json)
    logger = structlog.get_logger()
    if chosen.not_needed:
        logger.info("options_not_needed", options=chosen.not_needed)
    for name, closest in parser.unknown_variables(terminal.environ).items():
        logger.warning("variable_unknown", name=name, did_you_mean=closest or None)
    boot_id = procfs.boot_id()
    if chosen.gpus.is_simulated:
        from mig_manager.cli.commands import gpu_access

        state = str(chosen.gpus.simulate_state)
        gpu_access.prepare_simulation(
            chosen.gpus, lambda _: logger.warning("gpus_simulated", state=state)
        )
        boot_id = gpu_access.boot_id(chosen.gpus)
    return main.run(chosen, boot_id=boot_id)


def _doctor(parsed: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.cli.commands import doctor, doctor_checks, gpu_access
    from mig_manager.cli.commands import settings as command_settings

    chosen = command_settings.doctor_settings(parsed, terminal.environ)
    _configure_log(terminal, node_settings.LogLevel.ERROR, is_debug=chosen.is_debug)
    gpu_access.prepare_simulation(chosen.gpus, terminal.note)
    is_good = doctor.run(doctor_checks.CHECKS, chosen, terminal)
    return console.DONE if is_good else console.FAILED


def _support_bundle(parsed: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.cli.commands import gpu_access, support_bundle
    from mig_manager.cli.commands import settings as command_settings

    chosen = command_settings.bundle_settings(parsed, terminal.environ)
    _configure_log(terminal, node_settings.LogLevel.ERROR, is_debug=chosen.is_debug)
    gpu_access.prepare_simulation(chosen.doctor.gpus, terminal.note)
    return support_bundle.run(chosen, terminal)


def _demo(parsed: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.cli.commands import settings as command_settings

    chosen = command_settings.demo_settings(parsed, terminal.environ)
    try:
        from mig_manager.sandbox import fleet_story, scenarios
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            f"the demonstration needs {error.name}: pip install 'mig-manager[sandbox]'"
        ) from error
    if chosen.scenario not in scenarios.STORIES:
        known = ", ".join(scenarios.STORIES)
        raise errors.UsageError(f"there is no scenario {chosen.scenario!r}; there are {known}")
    _configure_log(terminal, node_settings.LogLevel.WARNING, is_debug=chosen.is_debug)
    style = terminal.style(chosen.colour)
    played = scenarios.Options(
        spec=chosen.spec or (fleet_story.SPEC if chosen.nodes else scenarios.SPEC),
        scenario=chosen.scenario,
        packaged=process.packaged_config(),
        is_real_time=chosen.is_real_time,
        is_kept=chosen.is_kept,
        exports=_path_exports(terminal.environ),
    )
    if not chosen.nodes:
        return scenarios.run(played, say=terminal.say, style=style)
    is_live = terminal.stdout.isatty() and terminal.environ.get("TERM") != "dumb"
    return fleet_story.run(played, chosen.nodes, say=terminal.say, style=style, is_live=is_live)


def _path_exports(environ: Mapping[str, str]) -> Sequence[str]:
    """Return what a shell needs to find the commands, such as those of a virtual environment."""
    import shlex
    import shutil
    import sysconfig

    if shutil.which(parser.PROGRAM, path=environ.get("PATH", "")):
        return ()
    return (f'export PATH={shlex.quote(sysconfig.get_path("scripts"))}:"$PATH"',)


def _rollout(parsed: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.cli.commands import rollout_settings

    chosen = rollout_settings.rollout_settings(parsed, terminal.environ)
    from mig_manager.cli.commands import rollout

    _configure_log(terminal, node_settings.LogLevel.ERROR, is_debug=chosen.is_debug)
    return rollout.run(chosen, terminal)


def _partitioner(parsed: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.partitioner import settings as partitioner_settings

    chosen = partitioner_settings.partitioner_settings(parsed, terminal.environ)
    if chosen.simulated_nodes and chosen.simulated_pods:
        import datetime as dt

        from mig_manager.adapters.host import files
        from mig_manager.partitioner import simulation

        report = simulation.simulate(
            files.ConfigFile(chosen.simulated_nodes, most_bytes=_MOST_BYTES).read(),
            files.ConfigFile(chosen.simulated_pods, most_bytes=_MOST_BYTES).read(),
            chosen.limits,
            now=dt.datetime.now(dt.UTC),
            is_mix=chosen.is_mix,
            selects=chosen.selects,
        )
        style = terminal.style(chosen.colour)
        terminal.answer(chosen.output_format.value, report.to_data, lambda: report.text(style))
        return console.DONE
    from mig_manager.partitioner import main

    is_json = chosen.log_format is node_settings.LogFormat.JSON
    _configure_log(terminal, chosen.log_level, is_debug=chosen.is_debug, is_json=is_json)
    return main.run(chosen)


_RUNNERS = {
    "agent": _agent,
    "demo": _demo,
    "doctor": _doctor,
    "partitioner": _partitioner,
    "rollout": _rollout,
    "support-bundle": _support_bundle,
}


def _configure_log(
    terminal: console.Console,
    level: node_settings.LogLevel,
    *,
    is_debug: bool,
    is_json: bool = False,
) -> None:
    level = node_settings.LogLevel.DEBUG if is_debug else level
    log.configure(level=level.value, is_json=is_json, stream=terminal.remarks)
