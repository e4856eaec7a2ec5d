"""The verified layout that a node saves for its next boot; no instance survives a reboot."""

from mig_manager import errors
from mig_manager.core import model, ports
from mig_manager.core.records import status


def save(
    store: ports.VerifiedLayouts,
    gpus: model.ObservedGpus,
    *,
    config: str,
    config_hash: str,
    boot_id: str,
) -> None:
    """Save a verified layout for the next boot; keep what is saved of unreachable GPUs.

    Args:
        store: Keeps one layout.
        gpus: As they were observed when the layout was verified.
        config: Name of the layout.
        config_hash: Hash of its meaning.
        boot_id: This boot.

    Raises:
        ConfigError: The layout cannot be written.
    """
    snapshot = tuple(gpu.snapshot for gpu in gpus)
    if gpus.unreachable:
        snapshot += gpus.missing(_saved(store))
    verified = status.VerifiedLayout(
        config=config, config_hash=config_hash, boot_id=boot_id, snapshot=snapshot
    )
    store.save(verified.to_json())


def _saved(store: ports.VerifiedLayouts) -> tuple[model.GpuSnapshot, ...]:
    """Return what is saved already; nothing where that cannot be read."""
    try:
        text = store.read()
        return status.VerifiedLayout.from_json(text).snapshot if text is not None else ()
    except (ValueError, errors.ConfigError):
        return ()
