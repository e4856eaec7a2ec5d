"""What the commands on this machine's GPUs share; no cluster, and no Kubernetes library."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.adapters.host import files, line_writer, process
from mig_manager.change import journal_file
from mig_manager.cli import gpu_access, gpu_settings
from mig_manager.cli.toolkit import console, gpu_text, layout_files
from mig_manager.core import messages, model
from mig_manager.core.files import yaml_diagnostics
from mig_manager.core.layout import available_layouts, layout_documents, layouts, plans
from mig_manager.core.planner import vgpus
from mig_manager.core.settings import node_settings

_MAX_NAMED = 6  # layouts that an error names before it counts the rest


class GpuCommand(gpu_access.CommandAdapters):
    """A command on this machine's GPUs, with its adapters."""

    def __init__(self, settings: gpu_settings.GpuSettings, terminal: console.Console) -> None:
        super().__init__(settings, terminal)
        terminal.configure_log(node_settings.LogLevel.WARNING, is_debug=settings.is_debug)
        self.style = terminal.style(settings.colour)
        self.is_wide = settings.output_format is node_settings.OutputFormat.WIDE

    def answer(
        self,
        data: Callable[[], Mapping[str, object]],
        text: Callable[[], str],
        *,
        is_good: bool = True,
    ) -> int:
        """Write the answer in the chosen format, and return the exit status."""
        return self._terminal.answer(self.settings.output_format, data, text, is_good=is_good)

    def layout(self) -> layouts.Layout:
        """Return the layout that the command line, a variable or the document selects.

        Raises:
            ConfigError: The document cannot be read, or has no layouts.
            LayoutError: The name is unknown (UNKNOWN_CONFIG).
            UsageError: No layout is named, and the document has several.
        """
        settings = self.settings
        if settings.pods_layouts and settings.layouts:
            layout, warnings = available_layouts.find(
                settings.layouts[0],
                self._read_of_pod,
                settings.pods_layouts,
                lambda: self.observed,
            )
            self.warn(warnings)
            return layout
        document = self.read(settings.config_file)
        self.warn(document.warnings)
        if settings.layouts:
            name = settings.layouts[0]
            with layout_files.explaining_names(settings.layouts):
                if settings.config_file is None and name not in document.layouts:
                    return self._generate(name, document)
                return document.layout(name)
        candidates = document.select(())
        if len(candidates) == 1:
            return candidates[0]
        fitting = self._fitting(document)
        names = messages.list_names(fitting or list(document.layouts), limit=_MAX_NAMED)
        suffix = " for these GPUs" if fitting else ""
        raise errors.UsageError(
            f"name a layout; {document.source} has {names}{suffix}",
            remedy=reasons.CommandRemedy("{} shows which ones fit.", "validate"),
        )

    def _read_of_pod(self) -> layout_documents.Document:
        """Return the agent's document; a default one that is unusable is also a warning."""
        try:
            return self.read(self.settings.config_file)
        except errors.ConfigError as error:
            if self.settings.pods_layouts and self.settings.pods_layouts.has_default_layouts:
                self.warn([f"the default layouts are not served: {error.message}"])
            raise

    def _fitting(self, document: layout_documents.Document) -> Sequence[str]:
        """Return the layouts that are known to fit this machine's GPUs."""
        fits = (
            available_layouts.fitting(document.layouts.values(), gpus) for gpus in self._nodes()
        )
        return [fit.layout.name for fit in itertools.chain(*fits)]

    def _generate(self, name: str, document: layout_documents.Document) -> layouts.Layout:
        """Generate a layout that the built-in file lacks, for this machine's GPUs."""
        nodes = self._nodes()
        for gpus in nodes:
            document = available_layouts.merge(
                document, available_layouts.generate(gpus), is_default=False
            )
        return document.layout(name, nodes)

    def _nodes(self) -> Sequence[model.ObservedGpus]:
        """Return this machine's GPUs, or nothing where they cannot be observed."""
        with contextlib.suppress(errors.HardwareError):
            return (self.observed,)
        return ()

    def read(self, file: str | None) -> layout_documents.Document:
        """Return a layout file, by default the built-in one."""
        packaged = process.packaged_config()
        return layout_files.read(
            self._terminal,
            file or str(packaged),
            source=file or f"built-in {packaged.name}",
            is_lenient=self.settings.is_lenient,
        )

    def checkpoint_file(self) -> str:
        """Return the named checkpoint; UsageError without one."""
        if self.settings.checkpoint_file is None:
            raise errors.UsageError("name the file: -f FILE, or set MIG_PARTED_CHECKPOINT_FILE")
        return self.settings.checkpoint_file

    def note_changes(
        self, executed: Sequence[plans.Planned], after: Collection[model.Gpu] = ()
    ) -> None:
        """Summarize what was changed, for people; ``after`` are the GPUs after it."""
        for planned in executed:
            self._terminal.note(gpu_text.summary(planned, after))
            self.warn(vgpus.host_warnings(planned.gpus, planned.plan))

    def warn(self, diagnostics: Iterable[yaml_diagnostics.Diagnostic | str]) -> None:
        """Write warnings, which systemd's journal marks as such."""
        for diagnostic in diagnostics:
            self._terminal.note(f"warning: {diagnostic}", priority=line_writer.Priority.WARNING)

    def note_interrupted(self, planned: plans.Planned) -> None:
        """Say that 'apply' undoes an interrupted run, which its plan does not show."""
        journal = files.JournalFile(self.settings.journal_file)
        gpus, desired = planned.gpus, planned.desired
        if interrupted := journal_file.what_follows(journal, gpus, desired):
            self._terminal.note(interrupted)

    def changed_by(self) -> str:
        """Describe the process that is changing the GPUs; empty without one.

        Raises:
            OSError: The lock file exists and cannot be inspected.
        """
        from mig_manager.adapters.host import lock_file

        manager = lock_file.manager(self.settings.lock_file)
        return manager.description if manager and manager.may_change_gpus else ""

    def warn_half_changed(self) -> None:
        """Warn of a change under way, or left unfinished: the GPUs may have half a layout."""
        settings = self.settings
        with contextlib.suppress(OSError):
            if manager := self.changed_by():
                self.warn([f"{manager} is changing the GPUs, which may be half changed"])
                return
        journal = files.JournalFile(settings.journal_file)
        if interrupted := journal_file.what_follows(journal):
            self.warn([interrupted])

    def warn_unreachable(self, unreachable: Sequence[model.UnreachableGpu], effect: str) -> None:
        """Name unreachable GPUs, with the effect on each."""
        from mig_manager.core.records import gpu_recovery

        for gpu in unreachable:
            remedy = gpu_recovery.remedy(gpu)
            self._terminal.note(f"warning: {gpu.sentence}; {effect}", remedy=remedy)
