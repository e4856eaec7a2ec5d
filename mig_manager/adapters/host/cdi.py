"""Regenerate CDI specs, which describe the GPUs to container runtimes, with ``nvidia-ctk``.

A changed spec is replaced atomically, after the tool succeeded. Sources: the CDI specification,
and ``cmd/nvidia-ctk/cdi`` of NVIDIA's container toolkit.

``nvidia-cdi-refresh.service`` writes the same spec when the driver or the toolkit changes, and not
after a change of MIG (NVIDIA/nvidia-container-toolkit#1828). It finds no device while MIG is on
without instances. After five failures in 10 s it gives up, and there is no spec until we write
one. ``NVIDIA_DRIVER_ROOT`` and ``NVIDIA_DEV_ROOT`` in its variables are for control devices alone.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import files, programs, root_paths
from mig_manager.core.files import yaml_text, yaml_tree
from mig_manager.core.settings import host_settings

_REASON = reasons.Reason.DEVICE_FILES_FAILED
_TOOL = "nvidia-ctk"
_MAX_SPEC_BYTES = yaml_text.MAX_CHARACTERS
"""Ten times the size for eight GPUs with seven instances each, in two naming strategies."""

SPEC = "/var/run/cdi/nvidia.yaml"
"""The spec of ``nvidia-cdi-refresh.service``, unless its variables name a file."""
STATIC_SPEC = "/etc/cdi/nvidia.yaml"
"""The spec that administrators write by hand, according to NVIDIA's instructions."""
_SERVICE_ENABLED = "/etc/systemd/system/multi-user.target.wants/nvidia-cdi-refresh.service"
_VARIABLES_FILE = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
_VARIABLE = re.compile(r"^[ \t]*(NVIDIA_CTK_\w+)[ \t]*=[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
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
"""Errors of the CDI library for a spec without devices, as with MIG on and no instance."""
_BREAK = re.compile(r"^---[ \t]*$", re.MULTILINE)
_SCRATCH = "/run"

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """One document of a spec."""

    text: str
    vendor: str
    class_: str
    names: tuple[str, ...]


def refresh(
    roots: host_settings.HostRoots,
    *,
    makes_management: bool,
    timeout_s: float,
    own_root: pathlib.Path = pathlib.Path("/"),
) -> None:
    """Update the specs that this machine has; HostError leaves a spec unchanged.

    Args:
        roots: Where the host's files are, and the driver's.
        makes_management: Whether to create the spec that the GPU operator's own containers use.
        timeout_s: The limit of each step of ``nvidia-ctk``.
        own_root: Our own root.
    """
    # The administrator's variables for the host's refresh service; one without a value is none.
    file = root_paths.resolve(roots.host_here, _VARIABLES_FILE)
    lines = _VARIABLE.findall(_read(file) if file else "")
    variables = {name: value.strip("\"'") for name, value in lines}
    spec = variables.pop(_OUTPUT_VARIABLE, SPEC)
    options: dict[str, Mapping[str, str]] = {STATIC_SPEC: {}, spec: variables}
    for name, each in options.items():
        path = root_paths.resolve(roots.host_here, name)
        if path is None and name == spec:
            path = _missing_spec(roots.host_here, spec)
        if path is not None and (path.is_file() or not path.exists()):
            _refresh_workloads(roots, path, each, timeout_s)
    if makes_management:
        _refresh_management(roots, own_root, timeout_s)


def _missing_spec(host: pathlib.Path, spec: str) -> pathlib.Path | None:
    """Return where to create the spec of the host's service; None if that is not enabled."""
    folder = root_paths.resolve(host, pathlib.PurePath(spec).parent)
    unit = root_paths.resolve(host, _SERVICE_ENABLED)
    # A masked unit leads to /dev/null.
    is_enabled = unit is not None and unit.is_file()
    return folder / pathlib.PurePath(spec).name if folder and is_enabled else None


def _refresh_workloads(
    roots: host_settings.HostRoots,
    path: pathlib.Path,
    variables: Mapping[str, str],
    timeout_s: float,
) -> None:
    program = programs.Programs((programs.Root(path=roots.host_here),)).find(_TOOL)
    if program is None:
        _skip(str(path), f"{_TOOL} is not found on the host")
        return
    program = dataclasses.replace(program, variables={**program.variables, **variables})
    arguments = ["cdi", "generate", *_naming(path, variables)]
    if roots.driver != pathlib.Path("/") and "NVIDIA_CTK_DRIVER_ROOT" not in variables:
        arguments += [f"--driver-root={roots.driver}", f"--dev-root={roots.dev}"]
    _make(path, program, [arguments], timeout_s)


def _refresh_management(
    roots: host_settings.HostRoots, own_root: pathlib.Path, timeout_s: float
) -> None:
    """Regenerate the operator's spec; our own tool must write the host's paths."""
    both = own_root, roots.host_here
    folders = (root_paths.resolve(root, _FOLDER) for root in both)
    folder = next((each for each in folders if each and each.is_dir()), None)
    program = programs.Programs([programs.Root(path=root) for root in both]).find(_TOOL)
    if folder is None or program is None:
        missing = _TOOL if program is None else _FOLDER
        _skip(_MANAGEMENT_SPEC, f"{missing} is found neither here nor on the host")
        return
    real_driver, real_dev = roots.driver, roots.dev
    driver, dev = real_driver, real_dev
    if program.root == own_root:
        driver, dev = roots.driver_here, roots.dev_here
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
    moves = dict.fromkeys(((driver, real_driver), (dev, real_dev)))
    transforms = [
        ["cdi", "transform", "root", f"--from={path}", f"--to={real}"]
        for path, real in moves
        if path != real
    ]
    _make(folder / _MANAGEMENT_SPEC, program, [generate, *transforms], timeout_s)


def _make(
    path: pathlib.Path,
    program: programs.Program,
    steps: Sequence[Sequence[str]],
    timeout_s: float,
) -> None:
    """Generate a spec, each step from the output of the previous one, and write it."""
    if not os.access(path.parent, os.W_OK):
        # A warning, because its users will miss the new devices.
        _log.warning("cdi_spec_kept", path=str(path), why="its folder cannot be written to")
        return
    if program.root != pathlib.Path("/") and root_paths.resolve(program.root, _SCRATCH):
        # The tool writes to a temporary file first, and the host may be mounted read-only.
        scratch = {"TMPDIR": _SCRATCH, **program.variables}
        program = dataclasses.replace(program, variables=scratch)
    text = ""
    for arguments in steps:
        done = programs.run(
            program,
            arguments,
            timeout_s=timeout_s,
            reason=_REASON,
            max_output_bytes=_MAX_SPEC_BYTES,
            stdin=text,
        )
        if done.status != 0 and any(each in done.stderr for each in _NOTHING):
            _skip(str(path), "it would have no device")
            return
        if done.status != 0:
            raise done.failure(_REASON)
        text = done.stdout
        if done.is_cut:
            raise errors.HostError(
                f"{done.line} wrote more than {_MAX_SPEC_BYTES} bytes", reason=_REASON
            )
    specs = _documents(text, f"{program}'s output")
    if not specs:
        raise errors.HostError(f"{program} wrote no spec", reason=_REASON)
    for spec in specs:
        # The tool can write several specs (``gpu`` and ``gpu.coherent``), and names the files
        # after the class.
        suffix = spec.class_.removeprefix(specs[0].class_)
        _replace(path.with_name(f"{path.stem}{suffix}{path.suffix}"), spec.text)


def _naming(path: pathlib.Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the options with which the tool names devices as the existing spec does."""
    try:
        (spec,) = _documents(_read(path), str(path))
    except (errors.HostError, ValueError):
        # No runtime can have used a file without a spec or with several.
        return
    if (spec.vendor, spec.class_) != ("nvidia.com", _CLASS):
        yield f"--vendor={spec.vendor}"
        yield f"--class={spec.class_}"
    if _STRATEGY_VARIABLE not in variables:
        for strategy, pattern in _STRATEGIES.items():
            if any(pattern.fullmatch(name) for name in spec.names):
                yield f"--device-name-strategy={strategy}"


def _documents(text: str, source: str) -> tuple[_Spec, ...]:
    """Parse the specs in a file or in the tool's output; HostError if one is not a spec."""
    specs = []
    for part in _BREAK.split(text):
        if not part.strip():
            continue
        try:
            data = yaml_tree.plain(yaml_text.parse(part, source=source))
        except errors.ConfigError as error:
            raise errors.HostError(
                f"{source} is not a CDI spec: {error.message}", reason=_REASON
            ) from error
        match data:
            case {"cdiVersion": str(), "kind": str(kind), "devices": [*devices]} if devices:
                vendor, _, class_ = kind.partition("/")
                names = tuple(str(each.get("name")) for each in devices if isinstance(each, dict))
                lead = "" if part.startswith("\n") else "\n"
                specs.append(
                    _Spec(text=f"---{lead}{part}", vendor=vendor, class_=class_, names=names)
                )
            case _:
                raise errors.HostError(
                    f"{source} is not a CDI spec: cdiVersion, kind or devices are missing",
                    reason=_REASON,
                )
    return tuple(specs)


def _replace(path: pathlib.Path, text: str) -> None:
    if _read(path) == text:
        return
    try:
        # The runtimes watch the folder, and read only files that end in .yaml or .json.
        files.replace(path, text, mode=0o644)
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
