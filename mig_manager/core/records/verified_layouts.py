"""The layout that was verified last: no MIG instance survives a reboot."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping

from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.core.records import inventory_codec, json_values, snapshot_codec

_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLayout:
    """The layout that was verified last, saved for the next boot."""

    layout: str
    content_hash: str
    boot_id: str  # the boot in which it was verified
    snapshots: tuple[model.GpuSnapshot, ...]
    """The GPUs of the node without a pending mode, even if the layout does not select them."""
    gpus: tuple[model.Gpu, ...] = ()
    """All GPUs, with the UUIDs of their devices in that boot, as far as known."""
    covered: tuple[str, ...]  # UUIDs of the GPUs that the layout selects
    earlier: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The layouts of GPUs that were unreachable when this one was verified, by UUID."""

    def to_json(self) -> str:
        """Return the text to keep."""
        return json.dumps(
            {
                "version": _VERSION,
                "config": self.layout,
                "configHash": self.content_hash,
                "bootId": self.boot_id,
                "snapshot": snapshot_codec.to_data(self.snapshots),
                "inventory": inventory_codec.to_data(self.gpus, has_devices=True),
                "earlier": dict(self.earlier),
                "covered": self.covered,
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> "VerifiedLayout":
        """Parse the kept text; ValueError if it is invalid, or of an unknown version."""
        data = json_text.parse_object(text)
        if data.get("version") != _VERSION:
            raise ValueError("not a layout kept by a version this program knows")
        gpus: tuple[model.Gpu, ...] = ()
        # Only a repair needs them, and a boot restores the layout without them.
        with contextlib.suppress(ValueError):
            gpus = inventory_codec.from_data(data.get("inventory", {}))
        earlier = data.get("earlier")
        json_values.items(data.get("covered"))  # neither missing nor too long
        return VerifiedLayout(
            layout=json_text.string(data, "config", ""),
            content_hash=json_text.string(data, "configHash", ""),
            boot_id=json_text.string(data, "bootId", ""),
            snapshots=snapshot_codec.from_data(data.get("snapshot")),
            gpus=gpus,
            covered=tuple(json_text.string_list(data, "covered")),
            # Only named to people.
            earlier={str(uuid): str(name) for uuid, name in earlier.items()}
            if isinstance(earlier, dict)
            else {},
        )
