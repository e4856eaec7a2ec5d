"""CDI specs, by which container runtimes know the GPUs: made anew by ``nvidia-ctk``.

The tool writes to stdout and the file is ours to replace: as a whole, on the word of a tool that
ended well, and only when it says something else than before. Sources: the CDI specification, and
``cmd/nvidia-ctk/cdi`` of NVIDIA's container toolkit.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.host import driver_files, files, programs
from mig_manager.core import yaml_tree
from mig_manager.core.host import host_settings

_REASON = errors.Reason.DEVICE_FILES_FAILED
_TOOL = "nvidia-ctk"
_MAX_SPEC_BYTES = yaml_tree.MAX_CHARACTERS
"""Eight GPUs cut in seven, each under two names, come to less than a tenth of it."""

SPEC = "/var/run/cdi/nvidia.yaml"
"""Where ``nvidia-cdi-refresh.service`` keeps the spec unless its file of variables says else."""
STATIC_SPEC = "/etc/cdi/nvidia.yaml"
"""Where those who make the spec by hand are told to keep it."""
_VARIABLES_FILE = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
_VARIABLE = re.compile(r"^\s*(NVIDIA_CTK_\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
_OUTPUT_VARIABLE = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"
_STRATEGY_VARIABLE = "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES"

_FOLDER = "/var/run/cdi"
_MANAGEMENT_SPEC = "management.nvidia.com-gpu.yaml"
_MANAGEMENT_VENDOR = "management.nvidia.com"
_CLASS = "gpu"

_STRATEGIES = {
    "index": re.compile(r"\d+(:\d+)?"),
    "uuid": re.compile(r"(GPU|MIG)-.+"),
    "type-index": re.compile(r"gpu\d+|mig\d+:\d+"),
}
_NOTHING = ("no devices", "empty device edits")
"""What the CDI library says of a spec without devices, as when MIG is on and nothing is made."""
_BREAK = re.compile(r"^---[ \t]*$", re.MULTILINE)
_MODE = 0o644
_SCRATCH = "/run"

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """One document of a spec."""

    text: str
    vendor: str
    class_: str
    names: tuple[str, ...]


class CdiSpecs:
    """Makes the specs that this machine uses anew.

    Args:
        roots: Where driver, devices and the host's files are.
        makes_management: Whether there shall be the spec that the GPU operator's own containers
            use, whether or not it is there.
        timeout_s: How long the tool may take for each step.
        here: Our own root.
    """

    def __init__(
        self,
        roots: host_settings.HostRoots,
        *,
        makes_management: bool,
        timeout_s: float,
        here: pathlib.Path = pathlib.Path("/"),
    ) -> None:
        self._roots = roots
        self._makes_management = makes_management
        self._timeout_s = timeout_s
        self._here = here
        self._host = programs.Programs((programs.Root(path=roots.host_here),))
        self._any = programs.Programs(
            (programs.Root(path=here), programs.Root(path=roots.host_here))
        )

    def refresh(self) -> None:
        """Bring the specs up to date; skips those that this machine does not have.

        Raises:
            HostError: DEVICE_FILES_FAILED: the tool failed, or a spec cannot be written. The
                specs are then as they were.
        """
        variables = _variables(self._roots.host_here)
        served = variables.pop(_OUTPUT_VARIABLE, SPEC)
        empty: Mapping[str, str] = {}
        for place, given in {STATIC_SPEC: empty, served: variables}.items():
            path = driver_files.inside(self._roots.host_here, place)
            if path is not None and path.is_file():
                self._refresh_workloads(path, given)
        if self._makes_management:
            self._refresh_management()

    def _refresh_workloads(self, path: pathlib.Path, variables: Mapping[str, str]) -> None:
        """Make the spec for workloads anew, with the names by which they know the devices."""
        program = self._host.find(_TOOL)
        if program is None:
            _skip(str(path), f"{_TOOL} is not found on the host")
            return
        program = dataclasses.replace(program, variables={**program.variables, **variables})
        arguments = ["cdi", "generate", *_as_before(path, variables)]
        if self._roots.driver != pathlib.Path("/") and "NVIDIA_CTK_DRIVER_ROOT" not in variables:
            arguments += [f"--driver-root={self._roots.driver}", f"--dev-root={self._roots.dev}"]
        self._make(path, program, [arguments])

    def _refresh_management(self) -> None:
        """Make the operator's spec anew; a tool of ours names places as the host does."""
        path = self._management_path()
        program = self._any.find(_TOOL)
        if path is None or program is None:
            missing = _TOOL if program is None else _FOLDER
            _skip(_MANAGEMENT_SPEC, f"{missing} is found neither here nor on the host")
            return
        roots = self._roots
        is_ours = program.root == self._here
        driver, dev = (roots.driver_here, roots.dev_here) if is_ours else (roots.driver, roots.dev)
        generate = [
            "cdi",
            "generate",
            "--mode=management",
            f"--vendor={_MANAGEMENT_VENDOR}",
            f"--class={_CLASS}",
            f"--driver-root={driver}",
            f"--dev-root={dev}",
        ]
        if roots.cdi_hook is not None:
            generate.append(f"--nvidia-cdi-hook-path={roots.cdi_hook}")
        moves = dict.fromkeys(((driver, roots.driver), (dev, roots.dev)))
        transforms = [
            ["cdi", "transform", "root", f"--from={seen}", f"--to={real}"]
            for seen, real in moves
            if seen != real
        ]
        self._make(path, program, [generate, *transforms])

    def _management_path(self) -> pathlib.Path | None:
        for root in (self._here, self._roots.host_here):
            folder = driver_files.inside(root, _FOLDER)
            if folder is not None and folder.is_dir():
                return folder / _MANAGEMENT_SPEC
        return None

    def _make(
        self, path: pathlib.Path, program: programs.Program, steps: Sequence[Sequence[str]]
    ) -> None:
        """Have the tool make a spec, each step from what the former one wrote, and keep it."""
        if not os.access(path.parent, os.W_OK):
            # Whoever uses it will miss the new devices.
            _log.warning("cdi_spec_kept", path=str(path), why="its folder cannot be written to")
            return
        if program.root != pathlib.Path("/") and driver_files.inside(program.root, _SCRATCH):
            # The tool writes to a temporary file first, and the host may be mounted read-only.
            scratch = {"TMPDIR": _SCRATCH, **program.variables}
            program = dataclasses.replace(program, variables=scratch)
        text = ""
        for arguments in steps:
            done = self._any.run(
                program,
                arguments,
                timeout_s=self._timeout_s,
                reason=_REASON,
                max_output_bytes=_MAX_SPEC_BYTES,
                stdin=text,
            )
            if done.status != 0 and any(each in done.stderr for each in _NOTHING):
                _skip(str(path), "there is no device to tell of")
                return
            if done.status != 0:
                raise done.refused(_REASON)
            text = done.stdout
            if done.is_cut:
                raise errors.HostError(
                    f"{done.line} wrote more than {_MAX_SPEC_BYTES} bytes", reason=_REASON
                )
        for place, spec in _places(path, text, program):
            _replace(place, spec.text)


def _variables(host: pathlib.Path) -> dict[str, str]:
    """Return what the administrator has the host's own refresh service use."""
    path = driver_files.inside(host, _VARIABLES_FILE)
    text = "" if path is None else _read(path)
    return {name: value.strip("\"'") for name, value in _VARIABLE.findall(text)}


def _as_before(path: pathlib.Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Return the options with which the tool names devices as a spec that is there does."""
    try:
        (spec,) = _documents(_read(path), str(path))
    except (errors.HostError, ValueError):
        # No spec, or several in one: nobody can have used it.
        return
    if (spec.vendor, spec.class_) != ("nvidia.com", _CLASS):
        yield f"--vendor={spec.vendor}"
        yield f"--class={spec.class_}"
    if _STRATEGY_VARIABLE not in variables:
        for strategy, pattern in _STRATEGIES.items():
            if any(pattern.fullmatch(name) for name in spec.names):
                yield f"--device-name-strategy={strategy}"


def _places(
    path: pathlib.Path, text: str, program: programs.Program
) -> tuple[tuple[pathlib.Path, _Spec], ...]:
    """Return the specs with where each belongs.

    The tool can write several (``gpu`` and ``gpu.coherent``), and names the files after the class.

    Raises:
        HostError: What it wrote is no spec.
    """
    specs = _documents(text, f"{program}'s output")
    if not specs:
        raise errors.HostError(f"{program} wrote no spec", reason=_REASON)
    first = specs[0].class_
    return tuple(
        (path.with_name(f"{path.stem}{spec.class_.removeprefix(first)}{path.suffix}"), spec)
        for spec in specs
    )


def _documents(text: str, source: str) -> tuple[_Spec, ...]:
    """Read the specs in a text.

    Raises:
        HostError: One of them is none.
    """
    parts = [part for part in _BREAK.split(text) if part.strip()]
    return tuple(_spec(part, source) for part in parts)


def _spec(text: str, source: str) -> _Spec:
    try:
        data = yaml_tree.plain(yaml_tree.parse(text, source=source))
    except errors.ConfigError as error:
        raise errors.HostError(
            f"{source} is no CDI spec: {error.message}", reason=_REASON
        ) from error
    match data:
        case {"cdiVersion": str(), "kind": str(kind), "devices": [*devices]} if devices:
            vendor, _, class_ = kind.partition("/")
            names = tuple(str(each.get("name")) for each in devices if isinstance(each, dict))
            lead = "" if text.startswith("\n") else "\n"
            return _Spec(text=f"---{lead}{text}", vendor=vendor, class_=class_, names=names)
        case _:
            raise errors.HostError(
                f"{source} is no CDI spec: cdiVersion, kind or devices are missing",
                reason=_REASON,
            )


def _replace(path: pathlib.Path, text: str) -> None:
    """Replace a spec atomically, because container runtimes watch its folder."""
    if _read(path) == text:
        return
    # The runtimes read only files that end in .yaml or .json.
    temporary = path.with_name(f".{path.name}.new")
    try:
        files.replace(path, text, mode=_MODE, temporary=temporary)
    except OSError as error:
        why = error.strerror or error
        raise errors.HostError(f"cannot write {path}: {why}", reason=_REASON) from error
    _log.info("cdi_spec_written", path=str(path))


def _read(path: pathlib.Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_SPEC_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _skip(what: str, why: str) -> None:
    _log.info("device_files_skipped", what=what, why=why)
