"""Why a GPU cannot give what a layout wants, told so that the reader knows what to change."""

from collections.abc import Iterable, Iterator, Mapping

from mig_manager import errors
from mig_manager.core import model, packing, placement
from mig_manager.core import profile as profiles

_ENGINES = (
    ("decoders", "decoder (NVDEC)"),
    ("encoders", "encoder (NVENC)"),
    ("jpegs", "JPEG engine (NVJPG)"),
    ("ofas", "optical-flow engine (OFA)"),
)


def unknown_profile(
    gpu: model.Gpu, profile: model.Profile, board: placement.Board
) -> errors.LayoutError:
    """Say that this very GPU does not offer a profile, and what it offers instead."""
    spec = board.find(profile.gpu_instance)
    if spec:
        slices = profile.gpu_slices
        sizes = [s for s in range(slices, 0, -1) if packing.is_offered(s, slices)]
        what = f"{profile.gpu_instance} offers compute instances of {_join(sizes)} slices"
    elif not board.specs:
        what = "the driver tells no profiles of this GPU"
    else:
        offered = [str(spec.profile) for spec in board.specs]
        meant = profiles.suggest(profile, [spec.profile for spec in board.specs])
        hint = f"did you mean {meant[0]}? " if meant else ""
        what = f"{hint}it offers {_join(offered)}"
    return errors.LayoutError(
        f"{gpu} has no profile {profile}: {what}", reason=errors.Reason.UNKNOWN_PROFILE
    )


def does_not_fit(
    gpu: model.Gpu, devices: Mapping[model.Profile, int], board: placement.Board
) -> errors.LayoutError:
    """Say what is exceeded, and how much of the layout would fit, filled largest first."""
    needed = instances(devices, board)
    why = [*_crowded(needed, board), *_drained(needed, board)] or [_scattered(needed, board)]
    return errors.LayoutError(
        f"{show(devices)} does not fit {gpu}: {'; '.join(why)}; "
        f"the largest part that fits is {show(_largest_part(devices, board)) or 'nothing'}",
        reason=errors.Reason.DOES_NOT_FIT,
    )


def show(devices: Mapping[model.Profile, int]) -> str:
    """Write devices as people do: ``2 x 2g.10gb + 3 x 1g.5gb``."""
    ordered = sorted(devices.items(), key=lambda item: item[0].sort_key)
    return " + ".join(f"{count} x {profile}" for profile, count in ordered if count)


def instances(
    devices: Mapping[model.Profile, int], board: placement.Board
) -> dict[model.Profile, int]:
    """Count the GPU instances that devices need at the least."""
    needed: dict[model.Profile, int] = {}
    for profile in sorted({device.gpu_instance for device in devices}, key=_sort_key):
        counts = packing.count_sizes(devices, profile)
        rough = -(-packing.total_slices(counts) // profile.gpu_slices)
        # A count beyond all hardware is settled by its slices: packing it would take for ever.
        hopeless = rough > board.most(profile)
        needed[profile] = rough if hopeless else len(packing.bins(counts))
    return needed


def _crowded(needed: Mapping[model.Profile, int], board: placement.Board) -> Iterator[str]:
    for profile, count in needed.items():
        spec = board.find(profile)
        held = placement.places(spec) if spec else 0
        if count > held:
            yield f"it needs {count} x {profile} and the memory slices hold {held}"


def _drained(needed: Mapping[model.Profile, int], board: placement.Board) -> Iterator[str]:
    for field, name in _ENGINES:
        has = getattr(board.pool, field)
        wants = sum(
            count * getattr(spec.engines, field)
            for profile, count in needed.items()
            if (spec := board.find(profile))
        )
        if wants > has:
            yield f"it needs {wants} x {name} and the GPU has {has}"


def _scattered(needed: Mapping[model.Profile, int], board: placement.Board) -> str:
    sizes = {spec.profile: max(p.size for p in spec.placements) for spec in board.specs}
    wants = sum(count * sizes[profile] for profile, count in needed.items())
    if wants > board.memory_slices:
        return f"it needs {wants} memory slices and the GPU has {board.memory_slices}"
    return (
        f"the possible placements in the {board.memory_slices} memory slices overlap "
        "however they are chosen"
    )


def _largest_part(
    devices: Mapping[model.Profile, int], board: placement.Board
) -> dict[model.Profile, int]:
    part: dict[model.Profile, int] = {}
    for profile in sorted(devices, key=_sort_key):
        for count in range(1, devices[profile] + 1):
            needed = instances({**part, profile: count}, board)
            if not board.fits(needed):
                break
            part[profile] = count
    return part


def _sort_key(profile: model.Profile) -> tuple[object, ...]:
    return profile.sort_key


def _join(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))
