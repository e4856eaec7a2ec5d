"""The commands at a shell: settings to adapters to a command to an answer.

They talk to NVML and to nothing else: no cluster is needed, and none of its libraries is loaded.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from mig_manager import (
    applying,
    booting,
    bootreport,
    commands,
    console,
    errors,
    ports,
    report,
    settings,
    shellsettings,
    standalone,
    validation,
)
from mig_manager.adapters import clock, files, gpu_thread
from mig_manager.core import config, document, holders, model

DONE, FAILED = 0, 1
_HOLDERS_TIMEOUT_S = 5.0
"""What the holders of the GPUs are worth to 'status'."""
_MOST_NAMED = 6
"""Layouts that an error names before it counts the rest."""
_MAX_CHARACTERS = document.MAX_CHARACTERS + 1
"""What to read of standard input: one more than is allowed, so that too much is seen as such."""


def run(command: str, given: shellsettings.CommandSettings, terminal: console.Console) -> int:
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


@contextlib.contextmanager
def completed(tell: Callable[[str], object]) -> Iterator[None]:
    """Hold a signal off until the body is complete, or a second one insists.

    A change that is cut off leaves GPUs without the instances from before and without the new
    ones. It ends by itself, undone if need be: what is in use is waited for with a deadline.

    Args:
        tell: Says that the signal was heard, and what it waits for.
    """
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)
        if len(held) > 1:
            resume()
            signal.raise_signal(number)
        tell("completing the change first, or undoing it; once more to leave it half done")

    def resume() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    # What nohup or a background job ignores stays ignored.
    handlers = {
        number: signal.signal(number, hold)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        resume()
    if held:
        signal.raise_signal(held[0])


class _Shell:
    """One command line."""

    def __init__(
        self, command: str, given: shellsettings.CommandSettings, terminal: console.Console
    ) -> None:
        self._command = command
        self._given = given
        self._terminal = terminal
        self._style = terminal.style(given.colour)
        self._is_wide = given.output_format is shellsettings.OutputFormat.WIDE
        self._scope = commands.Scope.MODE_ONLY if given.is_mode_only else commands.Scope.ALL

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
            "validate": self._validate,
        }

    def _status(self) -> int:
        result = commands.status(self._gpus())
        if self._given.output_format is not shellsettings.OutputFormat.TEXT:
            result = dataclasses.replace(result, held=self._held())
        self._answer(
            result.to_data,
            lambda: report.status(result, is_wide=self._is_wide, style=self._style),
        )
        return DONE

    def _held(self) -> Mapping[str, tuple[holders.Holder, ...]] | None:
        """Return who holds the GPUs; None where that is not told, which is no failure."""
        from mig_manager.adapters import nvml_inspect, procfs  # noqa: PLC0415 - seldom asked

        look = functools.partial(
            nvml_inspect.inspect,
            self._given.gpus.library_path,
            # The kernel knows nothing of simulated GPUs.
            proc_root=None if self._given.gpus.is_simulated else procfs.ROOT,
            but=(os.getpid(),),
        )
        timeout_s = min(_HOLDERS_TIMEOUT_S, self._given.gpu_timeout_s)
        try:
            return dict(gpu_thread.started(look).result(timeout_s).holders)
        except (errors.HardwareError, OSError, concurrent.futures.TimeoutError):
            return None

    def _plan(self) -> int:
        result = commands.plan(
            self._gpus(), self._layout(), scope=self._scope, holders=self._holders()
        )
        self._answer(
            result.to_data,
            lambda: report.plan(result, is_wide=self._is_wide, style=self._style),
        )
        return DONE

    def _apply(self) -> int:
        if self._given.hooks_file:
            raise errors.UsageError(
                f"hooks are not supported yet, so {self._given.hooks_file!r} would not run; "
                "leave out -k and unset MIG_PARTED_HOOKS_FILE to apply without hooks"
            )
        result = applying.apply(
            self._world(),
            self._layout,
            scope=self._scope,
            may_reset=not self._given.is_reset_skipped,
        )
        self._answer(result.to_data, lambda: "MIG configuration applied successfully")
        for planned in result.rounds:
            self._terminal.note(report.summary(planned))
        if not result.is_changed:
            self._terminal.note(f"layout '{result.layout}' was in force already")
        return DONE

    def _boot(self) -> int:
        if self._given.hooks_file:
            self._terminal.note(f"{self._given.hooks_file} is not run: there are no hooks at boot")
        is_told = bool(self._given.layouts or self._given.config_file)
        result = booting.boot(
            self._world(),
            self._layout if is_told else None,
            driver_timeout_s=self._given.driver_timeout_s,
        )
        self._answer(result.to_data, lambda: bootreport.restored(result))
        for planned in result.rounds:
            self._terminal.note(report.summary(planned))
        for problem in result.problems:
            self._terminal.note(problem.message, remedy=problem.remedy)
        return FAILED if result.problems else DONE

    def _assert(self) -> int:
        layout = self._layout()
        if self._given.is_valid_config_only:
            self._terminal.say("Selected MIG configuration is valid")
            return DONE
        result = commands.check(self._gpus(), layout, scope=self._scope)
        if result.is_applied:
            kind = (
                "mode settings from configuration"
                if self._given.is_mode_only
                else ("configuration")
            )
            self._answer(result.to_data, lambda: f"Selected MIG {kind} currently applied")
            return DONE
        if self._given.output_format is not shellsettings.OutputFormat.TEXT:
            self._answer(result.to_data, lambda: "")
        self._terminal.note(
            f"layout '{layout.name}' is not applied: {report.difference(result.planned)}",
            remedy="'mig-manager plan' shows every difference, 'mig-manager apply' ends them.",
        )
        return FAILED

    def _export(self) -> int:
        result = commands.export(self._gpus(), label=self._given.config_label)
        self._answer(result.to_data, lambda: document.dump(result.to_data()))
        return DONE

    def _validate(self) -> int:
        source = self._document()
        names = self._given.layouts or tuple(source.layouts)
        layouts = [source.layout(name) for name in names]
        result = (
            validation.against_products(layouts, source=source.source, templates=self._templates())
            if self._given.products
            else validation.against_node(
                layouts, source=source.source, gpus=self._gpus().observe()
            )
        )
        self._answer(result.to_data, lambda: report.validated(result, style=self._style))
        return FAILED if result.misfits else DONE

    def _answer(self, data: Callable[[], Mapping[str, object]], text: Callable[[], str]) -> None:
        match self._given.output_format:
            case shellsettings.OutputFormat.JSON:
                self._terminal.say(json.dumps(data(), indent=2))
            case shellsettings.OutputFormat.YAML:
                self._terminal.say(document.dump(data()))
            case shellsettings.OutputFormat.TEXT | shellsettings.OutputFormat.WIDE:
                self._terminal.say(text())

    def _document(self) -> config.Document:
        file = self._given.config_file
        if file == "-":
            return config.parse(self._standard_input(), source="<stdin>")
        source = files.ConfigFile(file or settings.packaged_config())
        return config.parse(source.read(), source=source.name)

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
        rest = len(known) - _MOST_NAMED
        some = ", ".join(known[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        raise errors.UsageError(f"name a layout; {source.source} has {some or 'none'}")

    def _gpus(self) -> ports.Gpus:
        """Return GPUs to look at, in this process, because that is quickest."""
        from mig_manager.adapters import nvml  # noqa: PLC0415 - not for `validate --gpu`

        self._simulate()
        if self._given.gpus.is_simulated:
            from mig_manager import simulation  # noqa: PLC0415 - not for real GPUs

            simulation.install(self._given.gpus)
        return gpu_thread.ThreadGpus(
            nvml.NvmlGpus(
                library_path=self._given.gpus.library_path,
                in_use_timeout_s=self._given.in_use_timeout_s,
                clock=clock.SystemClock(),
            ),
            timeout_s=self._given.gpu_timeout_s,
        )

    def _world(self) -> standalone.World:
        """Return what a change works with; its GPU work can be killed and undone."""
        from mig_manager.adapters import gpu_child, journalfile, lockfile  # noqa: PLC0415 - as above

        self._simulate()
        journal = journalfile.JournalFile(self._given.journal_file)
        proven = journalfile.ProvenFile(self._given.proven_file)
        if self._given.gpus.is_fresh:
            journal.clear()
            proven.clear()
        state = self._given.gpus.simulate_state
        world = standalone.World(
            gpus=gpu_child.ChildGpus(
                command=gpu_child.worker_command(
                    library_path=self._given.gpus.library_path,
                    simulate_state=str(state) if state else None,
                    in_use_timeout_s=self._given.in_use_timeout_s,
                ),
                timeout_s=self._given.gpu_timeout_s,
            ),
            exclusion=lockfile.LockFile(
                self._given.lock_file,
                program=f"mig-manager {self._command}",
                clock=clock.SystemClock(),
                is_required=True,
            ),
            journal=journal,
            proven=proven,
            clock=clock.SystemClock(),
            boot_id=self._boot_id(),
            lock_timeout_s=self._given.lock_timeout_s,
            tell=self._terminal.note,
            guard=lambda: completed(self._terminal.note),
        )
        # Simulated GPUs are no reason to do anything to the real machine.
        return world if state else self._with_machine(world)

    def _with_machine(self, world: standalone.World) -> standalone.World:
        from mig_manager.adapters import devicefiles, gpureset, tools  # noqa: PLC0415 - as above

        roots = self._given.roots
        return dataclasses.replace(
            world,
            reset=gpureset.SmiReset(tools.Tools(gpureset.roots(roots))).reset,
            device_files=devicefiles.DeviceFiles(roots),
        )

    def _boot_id(self) -> str:
        if self._given.gpus.is_simulated:
            from mig_manager import simulation  # noqa: PLC0415 - not for real GPUs

            return simulation.boot_id(self._given.gpus)
        from mig_manager.adapters import host  # noqa: PLC0415 - only to change something

        return host.boot_id()

    def _simulate(self) -> None:
        if self._given.gpus.is_simulated:
            from mig_manager import simulation  # noqa: PLC0415 - not for real GPUs

            simulation.prepare(self._given.gpus)
            self._terminal.note(f"GPUs are simulated, in {self._given.gpus.simulate_state}")

    def _holders(self) -> Mapping[str, tuple[str, ...]] | None:
        if self._given.pod_resources_socket is None:
            return None
        from mig_manager.adapters import podresources  # noqa: PLC0415 - only when asked for

        holders: dict[str, tuple[str, ...]] = {}
        for pod in podresources.PodResources(str(self._given.pod_resources_socket)).assigned():
            for device_id in pod.device_ids:
                holders[device_id] = (*holders.get(device_id, ()), pod.key)
        return holders

    def _templates(self) -> Sequence[model.Gpu]:
        from mig_manager.sandbox import hardware  # noqa: PLC0415 - only for products by name

        found = {
            product.key: product
            for pattern in self._given.products
            for product in hardware.match(pattern)
        }
        known = [product for product in found.values() if not product.not_simulatable]
        for product in found.values():
            if known and product not in known:
                self._terminal.note(f"{product.name} is left out: {product.not_simulatable}")
        # With nothing known, the first says why.
        return [hardware.template(product) for product in known or found.values()]
