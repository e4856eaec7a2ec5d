"""Composition root: arguments, then settings, then a command or the agent, then an exit status.

What is slow to import stands inside the function that needs it, so that ``--help`` loads no
YAML, and a command at a shell neither Kubernetes nor gRPC.
"""
# ruff: noqa: PLC0415 - see above

import contextlib
import traceback
from collections.abc import Mapping, Sequence

import mig_manager
from mig_manager import errors
from mig_manager.adapters.host import line_writer
from mig_manager.agent import settings
from mig_manager.cli import console, parser

_DONE, _FAILED, _UNUSABLE, _UNKNOWN_COMMAND = 0, 1, 2, 3
_PEER = "nvidia-mig-parted"
_INTERRUPTED = 128 + 2
_BROKEN_PIPE = 128 + 13
"""As a shell reports a program that SIGINT or SIGPIPE ended."""
_WARNING_OF_VARIABLES = frozenset(parser.COMMANDS) - {"agent", "completion", "help", "version"}
"""The agent writes its warning into its log."""
_INPUT_REASONS = frozenset(
    {
        errors.Reason.USAGE,
        errors.Reason.INVALID_CONFIG,
        errors.Reason.INVALID_CHECKPOINT,
        errors.Reason.UNKNOWN_CONFIG,
    }
)


def main(argv: Sequence[str], terminal: console.Console, *, program: str = parser.PROGRAM) -> int:
    """Run one command line.

    Args:
        argv: The arguments without the program's name.
        terminal: Streams and environment.
        program: The name that the program was called by.

    Returns:
        The exit status: 0 done, 1 not applied or failed, 2 unusable input, 3 unknown command.
        Under the name of NVIDIA's tool, which knows no 2, that is 1.
    """
    status = _main(argv, terminal)
    return _FAILED if program == _PEER and status == _UNUSABLE else status


def _main(argv: Sequence[str], terminal: console.Console) -> int:
    try:
        return _run(argv, terminal)
    except errors.MigManagerError as error:
        terminal.note(
            error.message, remedy=error.reason.remedy_at_shell, priority=line_writer.Priority.ERROR
        )
        return _status_of(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        terminal.forget()
        return _BROKEN_PIPE
    except console.AnswerLostError as error:
        terminal.note(str(error), priority=line_writer.Priority.ERROR)
        terminal.forget()
        return _FAILED
    except Exception as error:  # noqa: BLE001 - a bug must not end in a traceback
        _confess(error, argv, terminal)
        return _FAILED


def _run(argv: Sequence[str], terminal: console.Console) -> int:
    try:
        with contextlib.redirect_stdout(terminal.stdout):
            options = parser.parse(argv)
    except SystemExit:
        terminal.stdout.flush()
        return _DONE
    if options["command"] in _WARNING_OF_VARIABLES:
        _note_unknown_variables(terminal)
    match options["command"]:
        case None:
            terminal.say(parser.build().format_help())
            return _DONE
        case "version":
            terminal.say(f"mig-manager {mig_manager.__version__}")
            return _DONE
        case "agent" | "completion" | "demo" | "doctor" | "rollout" as command:
            return _WITH_SETTINGS_OF_THEIR_OWN[command](options, terminal)
        case command:
            return _shell(str(command), options, terminal)


def _note_unknown_variables(terminal: console.Console) -> None:
    from mig_manager.cli import commandline

    for name, closest in commandline.unknown_variables(terminal.environ).items():
        hint = f"; did you mean {closest}?" if closest else ""
        terminal.note(f"warning: {name} is ignored: no option has this variable{hint}")


def _shell(command: str, options: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.adapters.host import log
    from mig_manager.cli import command_settings, gpus

    given = command_settings.command_settings(options, terminal.environ)

    level = settings.LogLevel.DEBUG if given.is_debug else settings.LogLevel.WARNING
    log.configure(level=level.value, is_json=False, stream=terminal.remarks)
    return gpus.run(command, given, terminal)


def _agent(options: Mapping[str, object], terminal: console.Console) -> int:
    given = settings.agent_settings(options, terminal.environ)
    import structlog

    from mig_manager.adapters.host import log, this_machine
    from mig_manager.agent import main
    from mig_manager.cli import commandline

    log.configure(
        level=given.log_level.value,
        is_json=given.log_format is settings.LogFormat.JSON,
        stream=terminal.remarks,
    )
    logger = structlog.get_logger()
    if given.not_needed:
        logger.info("options_not_needed", options=given.not_needed)
    for name, closest in commandline.unknown_variables(terminal.environ).items():
        logger.warning("variable_unknown", name=name, did_you_mean=closest or None)
    boot_id = this_machine.boot_id()
    if given.gpus.is_simulated:
        from mig_manager.cli import simulation

        simulation.prepare(given.gpus)
        boot_id = simulation.boot_id(given.gpus)
        logger.warning("gpus_simulated", state=str(given.gpus.simulate_state))
    return main.run(given, boot_id=boot_id)


def _doctor(options: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.adapters.host import log
    from mig_manager.cli.doctor import doctor, doctorsettings

    given = doctorsettings.doctor_settings(options, terminal.environ)
    level = settings.LogLevel.DEBUG if given.is_debug else settings.LogLevel.ERROR
    log.configure(level=level.value, is_json=False, stream=terminal.remarks)
    if given.gpus.is_simulated:
        from mig_manager.cli import simulation

        simulation.prepare(given.gpus)
        terminal.note(f"GPUs are simulated, in {given.gpus.simulate_state}")
    return _DONE if doctor.run(given, terminal) else _FAILED


def _demo(options: Mapping[str, object], terminal: console.Console) -> int:
    given = settings.demo_settings(options, terminal.environ)
    from mig_manager.adapters.host import log

    try:
        from mig_manager.sandbox import demo
        from mig_manager.sandbox.show import scenarios
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            f"the demonstration needs {error.name}: pip install 'mig-manager[sandbox]'"
        ) from error
    if given.scenario not in scenarios.STORIES:
        known = ", ".join(scenarios.STORIES)
        raise errors.UsageError(f"there is no scenario {given.scenario!r}; there are {known}")
    level = settings.LogLevel.DEBUG if given.is_debug else settings.LogLevel.WARNING
    log.configure(level=level.value, is_json=False, stream=terminal.remarks)
    return demo.run(
        demo.Options(
            spec=given.spec,
            scenario=given.scenario,
            packaged=settings.packaged_config(),
            is_real_time=given.is_real_time,
            is_kept=given.is_kept,
        ),
        say=terminal.say,
        style=terminal.style(given.colour),
    )


def _rollout(options: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.adapters.host import log
    from mig_manager.cli import rolloutsettings

    given = rolloutsettings.rollout_settings(options, terminal.environ)
    from mig_manager.cli import rollout

    level = settings.LogLevel.DEBUG if given.is_debug else settings.LogLevel.ERROR
    log.configure(level=level.value, is_json=False, stream=terminal.remarks)
    return rollout.run(given, terminal)


def _completion(options: Mapping[str, object], terminal: console.Console) -> int:
    from mig_manager.cli import completion

    terminal.say(completion.answer(options, terminal.environ))
    return _DONE


_WITH_SETTINGS_OF_THEIR_OWN = {
    "agent": _agent,
    "completion": _completion,
    "demo": _demo,
    "doctor": _doctor,
    "rollout": _rollout,
}


def _status_of(error: errors.MigManagerError) -> int:
    if isinstance(error, parser.UnknownCommandError):
        return _UNKNOWN_COMMAND
    return _UNUSABLE if error.reason in _INPUT_REASONS else _FAILED


def _confess(error: Exception, argv: Sequence[str], terminal: console.Console) -> None:
    if not {"-d", "--debug"}.isdisjoint(argv):
        traceback.print_exception(error, file=terminal.remarks)
    terminal.note(
        f"internal error: {type(error).__name__}: {error}",
        remedy="This is a bug in mig-manager; please report it, with what --debug shows.",
        priority=line_writer.Priority.ERROR,
    )
