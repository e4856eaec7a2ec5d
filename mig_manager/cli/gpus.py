"""The commands at a shell: settings to adapters to a command to an answer.

They talk to NVML and to nothing else: no cluster is needed, and none of its libraries is loaded.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import files, line_writer
from mig_manager.agent import settings
from mig_manager.change import apply, boot, plans
from mig_manager.cli import command_settings, console, gpu_access, validate
from mig_manager.cli.render import bootreport, gpu_report
from mig_manager.core import messages, model, yaml_tree
from mig_manager.core.layout import config

DONE, FAILED = 0, 1
_MOST_NAMED = 6
"""Layouts that an error names before it counts the rest."""
_MAX_CHARACTERS = yaml_tree.MAX_CHARACTERS + 1
"""What to read of standard input: one more than is allowed, so that too much is seen as such."""


def run(command: str, given: command_settings.CommandSettings, terminal: console.Console) -> int:
    """Run a command and write its answer.

    Args:
        command: Its name.
        given: Its settings.
        terminal: Where answers and remarks go.

    Returns:
        The exit status.

    Raises:
        MigManagerError: It could not be done.
    """
    return _Shell(command, given, terminal).commands[command]()


class _Shell:
    """One command line."""

    def __init__(
        self, command: str, given: command_settings.CommandSettings, terminal: console.Console
    ) -> None:
        self._given = given
        self._terminal = terminal
        self._reach = gpu_access.Reach(command, given, terminal)
        self._style = terminal.style(given.colour)
        self._is_wide = given.output_format is command_settings.OutputFormat.WIDE
        self._scope = plans.Scope.MODE_ONLY if given.is_mode_only else plans.Scope.ALL

    @property
    def commands(self) -> Mapping[str, Callable[[], int]]:
        """Every command by name."""
        return {
            "status": self._status,
            "plan": self._plan,
            "apply": self._apply,
            "boot": self._boot,
            "assert": self._assert,
            "export": self._export,
            "generate-config": self._generate_config,
            "checkpoint": self._checkpoint,
            "restore": self._restore,
            "validate": self._validate,
        }

    def _status(self) -> int:
        result = plans.status(self._reach.gpus())
        if self._given.output_format is not command_settings.OutputFormat.TEXT:
            result = dataclasses.replace(result, processes=self._reach.holders())
        self._answer(
            result.to_data,
            lambda: gpu_report.status(result, is_wide=self._is_wide, style=self._style),
        )
        return DONE

    def _plan(self) -> int:
        result = plans.plan(
            self._reach.gpus(), self._layout(), scope=self._scope, users=self._reach.pods()
        )
        self._answer(
            result.to_data,
            lambda: gpu_report.plan(result, is_wide=self._is_wide, style=self._style),
        )
        self._warn(result.overlooked)
        return DONE

    def _apply(self) -> int:
        result = apply.apply(
            self._reach.world(),
            self._layout,
            scope=self._scope,
            may_reset=not self._given.is_reset_skipped,
        )
        self._answer(result.to_data, lambda: "MIG configuration applied successfully")
        self._warn(result.overlooked)
        self._warn_of(result.gpus.unreachable, "the layout is not active on it")
        for planned in result.rounds:
            self._terminal.note(gpu_report.summary(planned))
        if not result.is_changed:
            self._terminal.note(f"layout '{result.layout}' was in force already")
        return DONE

    def _checkpoint(self) -> int:
        file = self._checkpoint_file()
        gpus = self._reach.gpus().observe()
        from mig_manager.adapters.host import files  # noqa: PLC0415 - seldom asked for
        from mig_manager.core.records import checkpoint  # noqa: PLC0415 - the same

        files.write_output(pathlib.Path(file), checkpoint.render(gpus))
        self._warn_of(gpus.unreachable, "it is not in the checkpoint")
        self._terminal.say("MIG configuration checkpointed successfully")
        return DONE

    def _restore(self) -> int:
        from mig_manager.change import apply  # noqa: PLC0415 - seldom asked for

        source = files.ConfigFile(self._checkpoint_file())
        result = apply.restore(
            self._reach.world(),
            lambda: apply.CheckpointTarget.parse(source.read(), source=source.name),
            scope=self._scope,
        )
        self._answer(result.to_data, lambda: "MIG configuration restored successfully")
        self._warn_of(result.gpus.unreachable, "nothing was restored on it")
        for planned in result.rounds:
            self._terminal.note(gpu_report.summary(planned))
        if not result.is_changed:
            self._terminal.note(f"the GPUs have what {source.name} tells: nothing was done")
        return DONE

    def _checkpoint_file(self) -> str:
        file = self._given.checkpoint_file
        if file is None:
            raise errors.UsageError("name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE")
        return file

    def _boot(self) -> int:
        if self._given.hooks_file:
            self._terminal.note(f"{self._given.hooks_file} is not run: there are no hooks at boot")
        is_told = bool(self._given.layouts or self._given.config_file)
        result = boot.boot(
            self._reach.world(),
            self._layout if is_told else None,
            driver_timeout_s=self._given.driver_timeout_s,
        )
        self._answer(result.to_data, lambda: bootreport.restored(result))
        for planned in result.rounds:
            self._terminal.note(gpu_report.summary(planned))
        for problem in result.problems:
            self._terminal.note(
                problem.message, remedy=problem.remedy, priority=line_writer.Priority.ERROR
            )
        return FAILED if result.problems else DONE

    def _assert(self) -> int:
        layout = self._layout()
        if self._given.is_valid_config_only:
            self._terminal.say("Selected MIG configuration is valid")
            return DONE
        result = plans.check(self._reach.gpus(), layout, scope=self._scope)
        self._warn(result.planned.overlooked)
        self._warn_of(result.planned.gpus.unreachable, "what it has was not compared")
        if result.is_applied:
            kind = (
                "mode settings from configuration"
                if self._given.is_mode_only
                else ("configuration")
            )
            self._answer(result.to_data, lambda: f"Selected MIG {kind} currently applied")
            return DONE
        if self._given.output_format is not command_settings.OutputFormat.TEXT:
            self._answer(result.to_data, lambda: "")
        self._terminal.note(
            f"layout '{layout.name}' is not applied: {gpu_report.difference(result.planned)}",
            remedy="'mig-manager plan' shows every difference, 'mig-manager apply' ends them.",
        )
        return FAILED

    def _export(self) -> int:
        result = plans.export(
            self._reach.gpus(),
            label=self._given.config_label,
            has_placements=self._given.has_placements,
        )
        self._warn_of(result.unreachable, "it is not in the document")
        self._answer(result.to_data, lambda: yaml_tree.dump(result.to_data()))
        return DONE

    def _generate_config(self) -> int:
        result = plans.generate_config(
            self._reach.kinds(), has_all_maximal=self._given.has_all_maximal
        )
        target = self._given.output_file
        if target is None:
            self._answer(result.to_data, lambda: "")
            return DONE
        from mig_manager.adapters.host import files  # noqa: PLC0415 - seldom asked for

        files.write_output(target, self._rendered(result.to_data()))
        return DONE

    def _validate(self) -> int:
        command = validate.Validate(
            self._given, self._terminal, self._reach, self._read, self._style
        )
        answer = command.run()
        self._answer(answer.to_data, lambda: answer.text)
        return DONE if answer.is_good else FAILED

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        match self._given.output_format:
            case command_settings.OutputFormat.JSON | command_settings.OutputFormat.YAML:
                self._terminal.say(self._rendered(data()))
            case command_settings.OutputFormat.TEXT | command_settings.OutputFormat.WIDE:
                self._terminal.say(text())

    def _rendered(self, data: Mapping[str, object]) -> str:
        if self._given.output_format is command_settings.OutputFormat.JSON:
            return json.dumps(data, indent=2) + "\n"
        return yaml_tree.dump(data)

    def _document(self) -> config.Document:
        source = self._read(self._given.config_file)
        self._warn(source.warnings)
        return source

    def _read(self, file: str | None) -> config.Document:
        if file == "-":
            text, name = self._standard_input(), "<stdin>"
        else:
            source = files.ConfigFile(file or settings.packaged_config())
            text, name = source.read(), source.name
        return config.parse(text, source=name, is_lenient=self._given.is_lenient)

    def _warn(self, passed: Sequence[yaml_tree.Diagnostic]) -> None:
        for remark in passed:
            self._terminal.note(f"warning: {remark}", priority=line_writer.Priority.WARNING)

    def _warn_of(self, unreachable: Sequence[model.UnreachableGpu], effect: str) -> None:
        for gpu in unreachable:
            self._terminal.note(
                f"warning: {gpu.sentence}; {effect}",
                remedy=errors.Reason.GPU_UNREACHABLE.remedy,
            )

    def _standard_input(self) -> str:
        try:
            return self._terminal.stdin.read(_MAX_CHARACTERS)
        except (OSError, UnicodeError) as error:
            raise errors.ConfigError(f"cannot read standard input: {error}") from error

    def _layout(self) -> config.Layout:
        source = self._document()
        if self._given.layouts:
            return source.layout(self._given.layouts[0])
        if len(source.layouts) == 1:
            return next(iter(source.layouts.values()))
        known = list(source.layouts)
        some = messages.listed(known, most=_MOST_NAMED)
        raise errors.UsageError(f"name a layout; {source.source} has {some or 'none'}")
