"""The commands on this machine's GPUs: ``status``, ``plan``, ``apply`` and their relatives.

They need no cluster, and load none of its libraries.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import files, log
from mig_manager.agent import settings
from mig_manager.change import apply, boot, plans
from mig_manager.cli import command_settings, console, gpu_access, gpu_report, validate
from mig_manager.core import messages, model, yaml_tree
from mig_manager.core.layout import config

DONE, FAILED = 0, 1
_MOST_NAMED = 6
"""Layouts that an error names before it counts the rest."""


def run(command: str, chosen: command_settings.CommandSettings, terminal: console.Console) -> int:
    """Run a command and write its answer; return the exit status.

    Raises:
        MigManagerError: It failed.
    """
    return _Command(command, chosen, terminal).run()


class _Command:
    """One command line."""

    def __init__(
        self, command: str, chosen: command_settings.CommandSettings, terminal: console.Console
    ) -> None:
        self._name = command
        self._chosen = chosen
        self._terminal = terminal
        self._access = gpu_access.GpuAccess(command, chosen, terminal)
        self._style = terminal.style(chosen.colour)
        self._is_wide = chosen.output_format is command_settings.OutputFormat.WIDE
        self._scope = plans.Scope.MODE_ONLY if chosen.is_mode_only else plans.Scope.ALL

    def run(self) -> int:
        commands: Mapping[str, Callable[[], int]] = {
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
        return commands[self._name]()

    def _status(self) -> int:
        result = plans.status(self._access.gpus())
        if self._chosen.output_format is not command_settings.OutputFormat.TEXT:
            result = dataclasses.replace(result, processes=self._access.processes())
        self._answer(
            result.to_data,
            lambda: gpu_report.status(result, is_wide=self._is_wide, style=self._style),
        )
        return DONE

    def _plan(self) -> int:
        result = plans.plan(
            self._access.gpus(),
            self._layout(),
            scope=self._scope,
            users=self._access.pods_by_device(),
        )
        self._answer(
            result.to_data,
            lambda: gpu_report.plan(result, is_wide=self._is_wide, style=self._style),
        )
        self._warn(result.overlooked)
        return DONE

    def _apply(self) -> int:
        result = apply.apply(
            self._access.dependencies(),
            self._layout,
            scope=self._scope,
            may_reset=not self._chosen.is_reset_skipped,
        )
        self._answer(result.to_data, lambda: "MIG configuration applied successfully")
        self._warn(result.overlooked)
        self._warn_unreachable(result.gpus.unreachable, "the layout is not active on it")
        for planned in result.rounds:
            self._terminal.note(gpu_report.summary(planned))
        if not result.is_changed:
            self._terminal.note(f"layout '{result.layout}' is already active")
        return DONE

    def _checkpoint(self) -> int:
        file = self._checkpoint_file()
        gpus = self._access.gpus().observe()
        from mig_manager.core.records import checkpoint  # noqa: PLC0415 - rarely used

        files.write_output(pathlib.Path(file), checkpoint.render(gpus))
        self._warn_unreachable(gpus.unreachable, "it is not in the checkpoint")
        self._terminal.say("MIG configuration checkpointed successfully")
        return DONE

    def _restore(self) -> int:
        source = files.ConfigFile(self._checkpoint_file())
        result = apply.restore(
            self._access.dependencies(),
            lambda: apply.CheckpointTarget.parse(source.read(), source=source.name),
            scope=self._scope,
        )
        self._answer(result.to_data, lambda: "MIG configuration restored successfully")
        self._warn_unreachable(result.gpus.unreachable, "nothing was restored on it")
        for planned in result.rounds:
            self._terminal.note(gpu_report.summary(planned))
        if not result.is_changed:
            self._terminal.note(f"{source.name} is already active; nothing to do")
        return DONE

    def _checkpoint_file(self) -> str:
        file = self._chosen.checkpoint_file
        if file is None:
            raise errors.UsageError("name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE")
        return file

    def _boot(self) -> int:
        if self._chosen.hooks_file:
            self._terminal.note(f"{self._chosen.hooks_file} is ignored: boot runs no hooks")
        is_named = bool(self._chosen.layouts or self._chosen.config_file)
        result = boot.boot(
            self._access.dependencies(),
            self._layout if is_named else None,
            driver_timeout_s=self._chosen.driver_timeout_s,
        )
        self._answer(result.to_data, lambda: _boot_text(result))
        for planned in result.rounds:
            self._terminal.note(gpu_report.summary(planned))
        for problem in result.problems:
            self._terminal.note(
                problem.message, remedy=problem.remedy, priority=log.Priority.ERROR
            )
        return FAILED if result.problems else DONE

    def _assert(self) -> int:
        layout = self._layout()
        if self._chosen.is_valid_config_only:
            self._terminal.say("Selected MIG configuration is valid")
            return DONE
        result = plans.check(self._access.gpus(), layout, scope=self._scope)
        self._warn(result.planned.overlooked)
        self._warn_unreachable(result.planned.gpus.unreachable, "it was not compared")
        if result.is_applied:
            kind = (
                "mode settings from configuration"
                if self._chosen.is_mode_only
                else "configuration"
            )
            self._answer(result.to_data, lambda: f"Selected MIG {kind} currently applied")
            return DONE
        if self._chosen.output_format is not command_settings.OutputFormat.TEXT:
            self._answer(result.to_data, lambda: "")
        self._terminal.note(
            f"layout '{layout.name}' is not applied: {gpu_report.difference(result.planned)}",
            remedy="'mig-manager plan' shows all differences, 'mig-manager apply' removes them.",
        )
        return FAILED

    def _export(self) -> int:
        result = plans.export(
            self._access.gpus(),
            label=self._chosen.config_label,
            has_placements=self._chosen.has_placements,
        )
        self._warn_unreachable(result.unreachable, "it is not in the document")
        self._answer(result.to_data, lambda: yaml_tree.dump(result.to_data()))
        return DONE

    def _generate_config(self) -> int:
        result = plans.generate_config(
            self._access.kinds(), has_all_maximal=self._chosen.has_all_maximal
        )
        target = self._chosen.output_file
        if target is None:
            self._answer(result.to_data, lambda: "")
            return DONE

        text = console.rendered(result.to_data(), self._chosen.output_format.value)
        files.write_output(target, text)
        return DONE

    def _validate(self) -> int:
        result = validate.validate(self._chosen, self._terminal, self._access, self._read)
        self._answer(result.to_data, lambda: result.text(self._style))
        return DONE if result.is_good else FAILED

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        self._terminal.answer(self._chosen.output_format.value, data, text)

    def _document(self) -> config.Document:
        source = self._read(self._chosen.config_file)
        self._warn(source.warnings)
        return source

    def _read(self, file: str | None) -> config.Document:
        name = file or str(settings.packaged_config())
        return self._terminal.layout_file(name, is_lenient=self._chosen.is_lenient)

    def _warn(self, diagnostics: Sequence[yaml_tree.Diagnostic]) -> None:
        for diagnostic in diagnostics:
            self._terminal.note(f"warning: {diagnostic}", priority=log.Priority.WARNING)

    def _warn_unreachable(self, unreachable: Sequence[model.UnreachableGpu], effect: str) -> None:
        for gpu in unreachable:
            self._terminal.note(
                f"warning: {gpu.sentence}; {effect}",
                remedy=errors.Reason.GPU_UNREACHABLE.remedy,
            )

    def _layout(self) -> config.Layout:
        source = self._document()
        if self._chosen.layouts:
            return source.layout(self._chosen.layouts[0])
        if len(source.layouts) == 1:
            return next(iter(source.layouts.values()))
        known = list(source.layouts)
        names = messages.listed(known, most=_MOST_NAMED)
        raise errors.UsageError(f"name a layout; {source.source} has {names or 'none'}")


def _boot_text(result: boot.Restored) -> str:
    if not result.layout:
        return "No layout is kept for the boot: nothing was done."
    if result.rounds:
        rest = " in part" if result.problems else ""
        return f"Layout {result.layout} is restored{rest}."
    if result.problems:
        return f"Layout {result.layout} is not restored: nothing was done."
    return f"Layout {result.layout} is already active: nothing to do."
