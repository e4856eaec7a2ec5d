"""The commands on this machine's GPUs: ``status``, ``plan``, ``apply`` and their relatives.

They need no cluster and load no Kubernetes library.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters.host import files, log, process
from mig_manager.agent import served_layouts
from mig_manager.change import apply, boot
from mig_manager.cli.commands import gpu_access
from mig_manager.cli.commands import settings as command_settings
from mig_manager.cli.toolkit import console, gpu_report, program, validation
from mig_manager.core import messages, model, node_settings, yaml_tree
from mig_manager.core.layout import generator, layouts, plans, served, validate
from mig_manager.core.planner import vgpus

_MOST_NAMED = 6  # layouts that an error names before it counts the rest


class GpuCommands:
    """The commands on one command line's settings; they answer and return the exit status."""

    def __init__(self, parsed: program.Parsed, terminal: console.Console) -> None:
        self._chosen = command_settings.command_settings(parsed, terminal.environ)
        self._terminal = terminal
        terminal.configure_log(node_settings.LogLevel.WARNING, is_debug=self._chosen.is_debug)
        self._access = gpu_access.GpuAccess(str(parsed["command"]), self._chosen, terminal)
        self._style = terminal.style(self._chosen.colour)
        self._is_wide = self._chosen.output_format is command_settings.OutputFormat.WIDE
        self._scope = plans.Scope.MODE_ONLY if self._chosen.is_mode_only else plans.Scope.ALL

    def status(self) -> int:
        if self._chosen.is_watched:
            return self._watch()
        result = plans.Status(gpus=self._access.gpus().observe())
        if self._chosen.output_format is not command_settings.OutputFormat.TEXT:
            result = dataclasses.replace(result, processes=self._access.processes())
        self._answer(
            result.to_data,
            lambda: gpu_report.status(result, is_wide=self._is_wide, style=self._style),
        )
        return console.DONE

    def _watch(self) -> int:
        from mig_manager.adapters.host import lock_file  # noqa: PLC0415 - rarely used
        from mig_manager.cli.toolkit import live  # noqa: PLC0415 - rarely used

        live.require_text(self._chosen.output_format.value)
        gpus = self._access.gpus()

        def refresh() -> live.View:
            text, lines = gpu_report.live_status(
                plans.Status(gpus=gpus.observe(), processes=self._access.processes()),
                pods=self._access.pods_by_device() or {},
                changed_by=lock_file.owner(self._chosen.lock_file),
                is_wide=self._is_wide,
                style=self._terminal.style(self._chosen.colour),
            )
            return live.View(text, lines)

        return live.run(self._terminal, refresh)

    def plan(self) -> int:
        layout, users = self._layout(), self._access.pods_by_device()
        gpus = self._access.gpus().observe()
        result = plans.plan(gpus, layout, scope=self._scope, users=users)
        self._answer(
            result.to_data,
            lambda: gpu_report.plan(result, is_wide=self._is_wide, style=self._style),
        )
        self._warn(result.warnings)
        return console.DONE

    def apply(self) -> int:
        if self._chosen.is_dry_run:
            if self._chosen.is_reset_skipped:
                raise errors.UsageError("--dry-run shows no effect of --skip-reset; give one")
            return self.plan()
        result = apply.apply(
            dataclasses.replace(
                self._access.dependencies(), may_reset=not self._chosen.is_reset_skipped
            ),
            self._layout,
            scope=self._scope,
        )
        self._answer(result.to_data, lambda: "MIG configuration applied successfully")
        self._warn(result.overlooked)
        self._warn_unreachable(result.gpus.unreachable, "the layout is not active on it")
        self._note_changes(result.rounds)
        if not result.is_changed:
            self._terminal.note(f"layout '{result.layout}' is already active")
        return console.DONE

    def checkpoint(self) -> int:
        from mig_manager.core.records import checkpoint  # noqa: PLC0415 - rarely used

        file, gpus = self._checkpoint_file(), self._access.observed
        files.write_output(pathlib.Path(file), checkpoint.render(gpus))
        self._warn_unreachable(gpus.unreachable, "it is not in the checkpoint")
        self._terminal.say("MIG configuration checkpointed successfully")
        return console.DONE

    def restore(self) -> int:
        source = files.ConfigFile(self._checkpoint_file())
        result = apply.restore(self._access.dependencies(), source, scope=self._scope)
        self._answer(result.to_data, lambda: "MIG configuration restored successfully")
        self._warn_unreachable(result.gpus.unreachable, "nothing was restored on it")
        self._note_changes(result.rounds)
        if not result.is_changed:
            self._terminal.note(f"{source.name} is already active; nothing to do")
        return console.DONE

    def _checkpoint_file(self) -> str:
        if self._chosen.checkpoint_file is None:
            raise errors.UsageError("name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE")
        return self._chosen.checkpoint_file

    def boot(self) -> int:
        if self._chosen.hooks_file:
            self._terminal.note(f"{self._chosen.hooks_file} is ignored: boot runs no hooks")
        is_named = bool(self._chosen.layouts or self._chosen.config_file)
        result = boot.boot(
            self._access.dependencies(),
            self._layout if is_named else None,
            driver_timeout_s=self._chosen.driver_timeout_s,
        )
        if not result.layout:
            text = "No layout is saved for the boot: nothing to do."
        elif result.rounds:
            text = f"Layout {result.layout} is restored{' in part' * bool(result.problems)}."
        elif result.problems:
            text = f"Layout {result.layout} was not restored: nothing was changed."
        else:
            text = f"Layout {result.layout} is already active: nothing to do."
        self._answer(result.to_data, lambda: text)
        self._note_changes(result.rounds)
        for problem in result.problems:
            self._terminal.note(
                problem.message, remedy=problem.remedy, priority=log.Priority.ERROR
            )
        return console.FAILED if result.problems else console.DONE

    def check(self) -> int:
        layout = self._layout()
        if self._chosen.is_valid_config_only:
            self._terminal.say("Selected MIG configuration is valid")
            return console.DONE
        result = plans.plan(self._access.gpus().observe(), layout, scope=self._scope)
        self._warn(result.overlooked)
        self._warn_unreachable(result.gpus.unreachable, "it was not compared")
        if result.is_applied:
            is_mode_only = self._chosen.is_mode_only
            kind = "mode settings from configuration" if is_mode_only else "configuration"
            self._answer(result.to_data, lambda: f"Selected MIG {kind} currently applied")
            return console.DONE
        if self._chosen.output_format is not command_settings.OutputFormat.TEXT:
            self._answer(result.to_data, lambda: "")
        self._terminal.note(
            f"layout '{layout.name}' is not applied: {gpu_report.difference(result)}",
            remedy="'mig-manager plan' shows all differences, 'mig-manager apply' removes them.",
        )
        return console.FAILED

    def export(self) -> int:
        gpus, chosen = self._access.observed, self._chosen
        layout = layouts.export(
            gpus, name=chosen.config_label, has_placements=chosen.has_placements
        )
        self._warn_unreachable(gpus.unreachable, "it is not in the document")
        document = layouts.render([layout])
        self._terminal.say(console.rendered(document, chosen.output_format.value))
        return console.DONE

    def generate_config(self) -> int:
        if self._chosen.products:
            from mig_manager.catalogue import hardware  # noqa: PLC0415 - only for products

            kinds = hardware.kinds(self._chosen.products, warn=self._terminal.note)
        else:
            kinds = generator.kinds_of(self._access.observed)
        generated = generator.layouts_of(kinds, has_all_maximal=self._chosen.has_all_maximal)
        document = layouts.render(generated.values())
        text = console.rendered(document, self._chosen.output_format.value)
        if self._chosen.output_file is None:
            self._terminal.say(text)
        else:
            files.write_output(self._chosen.output_file, text)
        return console.DONE

    def validate(self) -> int:
        """Check layouts of one file, or with ``--files`` all layouts of several."""
        if not self._chosen.has_files:
            result = self._validated(self._read(self._chosen.config_file), self._chosen.layouts)
            self._answer(result.to_data, lambda: result.text(self._style))
            return console.DONE if result.is_good else console.FAILED
        if not self._chosen.layouts:
            raise errors.UsageError("--files: name the layout files to check")
        results = []
        for file in self._chosen.layouts:
            try:
                results.append(self._validated(self._read(file), ()))
            except errors.ConfigError as error:
                self._terminal.note_error(error, error.own_remedy)
        is_good = len(results) == len(self._chosen.layouts) and all(r.is_good for r in results)
        self._answer(
            lambda: {
                "kind": "Validations",
                "is_valid": is_good,
                "files": [each.to_data() for each in results],
            },
            lambda: "\n\n".join(
                f"{self._style.fitted(each.document.source)}\n{each.text(self._style)}"
                for each in results
            ),
        )
        return console.DONE if is_good else console.FAILED

    def _validated(
        self, document: layouts.Document, names: Sequence[str]
    ) -> validation.ValidatedFile:
        """Compare layouts with the named products, or else with this machine's GPUs."""
        for diagnostic in (*document.warnings, *validation.unknown_names(document)):
            self._terminal.note(f"warning: {diagnostic}")
        selected = [document.layout(name) for name in names or document.layouts]
        from mig_manager.catalogue import hardware  # noqa: PLC0415 - only for products

        # Named layouts must fit these GPUs; the others may be for other known products.
        others = None if names or self._chosen.must_fit else hardware.known_gpus
        source = document.source
        fits = None
        if self._chosen.products:
            fits = validate.against_products(
                selected, source=source, templates=self._templates, others=others
            )
        elif not self._chosen.is_portable:
            fits = validate.against_node(
                selected, source=source, gpus=self._access.observed, others=others
            )
        return validation.ValidatedFile(
            document=document, fits=fits, checks_portability=self._chosen.is_portable
        )

    @functools.cached_property
    def _templates(self) -> Sequence[model.Gpu]:
        """An idle GPU of every product on the command line."""
        from mig_manager.catalogue import hardware  # noqa: PLC0415 - only for products

        return hardware.templates(self._chosen.products, warn=self._terminal.note)

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        self._terminal.answer(self._chosen.output_format.value, data, text)

    def _layout(self) -> layouts.Layout:
        if self._chosen.pods_layouts and self._chosen.layouts:
            layout, warnings = served_layouts.find(
                self._chosen.layouts[0],
                files.ConfigFile(str(self._chosen.config_file)),
                self._chosen.pods_layouts,
                lambda: self._access.observed,
            )
            self._warn(warnings)
            return layout
        source = self._read(self._chosen.config_file)
        self._warn(source.warnings)
        if self._chosen.layouts:
            name = self._chosen.layouts[0]
            if self._chosen.config_file is None and name not in source.layouts:
                return self._generated(name, source)
            return source.layout(name)
        if len(source.layouts) == 1:
            return next(iter(source.layouts.values()))
        names = messages.listed(list(source.layouts), most=_MOST_NAMED)
        raise errors.UsageError(f"name a layout; {source.source} has {names or 'none'}")

    def _generated(self, name: str, source: layouts.Document) -> layouts.Layout:
        """Generate a layout that the built-in file lacks, for this machine's GPUs."""
        try:
            gpus = self._access.observed
        except errors.HardwareError:
            return source.layout(name)
        every = served.merged(source, served.generated(gpus), is_default=False)
        return every.layout(name, (gpus,))

    def _read(self, file: str | None) -> layouts.Document:
        packaged = process.packaged_config()
        return self._terminal.layout_file(
            file or str(packaged),
            source=file or f"built-in {packaged.name}",
            is_lenient=self._chosen.is_lenient,
        )

    def _note_changes(self, rounds: Sequence[plans.Planned]) -> None:
        for planned in rounds:
            self._terminal.note(gpu_report.summary(planned))
            self._warn(vgpus.host_warnings(planned.gpus, planned.plan))

    def _warn(self, diagnostics: Sequence[yaml_tree.Diagnostic | str]) -> None:
        for diagnostic in diagnostics:
            self._terminal.note(f"warning: {diagnostic}", priority=log.Priority.WARNING)

    def _warn_unreachable(self, unreachable: Sequence[model.UnreachableGpu], effect: str) -> None:
        for gpu in unreachable:
            remedy = errors.Reason.GPU_UNREACHABLE.remedy
            self._terminal.note(f"warning: {gpu.sentence}; {effect}", remedy=remedy)
