"""The GPUs as they were when their layout was verified, to recognize a change by others."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.core.files import json_text
from mig_manager.core.records import snapshot_codec

_HASH_DIGITS = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuFingerprints:
    """The GPUs as they had the layout in the label ``mig-manager.io/applied``."""

    boot_id: str
    gpus: Mapping[str, str]
    """UUID -> fingerprint of mode and instances, of the GPUs that were reachable then; empty for
    a GPU outside the layout."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """UUID -> the GPU as messages name it."""

    @staticmethod
    def of(
        gpus: model.ObservedGpus, boot_id: str, outside: Container[str] = ()
    ) -> "GpuFingerprints":
        """Return the record of GPUs whose layout was verified; it does not select ``outside``."""
        return GpuFingerprints(
            boot_id=boot_id,
            gpus={gpu.uuid: "" if gpu.uuid in outside else _fingerprint(gpu) for gpu in gpus},
            names={gpu.uuid: str(gpu) for gpu in gpus},
        )

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"bootId": self.boot_id, "gpus": dict(self.gpus), "names": dict(self.names)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "GpuFingerprints":
        """Parse plain data; see ``json_text.decoding`` for its exceptions."""
        return GpuFingerprints(
            boot_id=json_text.string(data, "bootId"),
            gpus=json_text.strings(data["gpus"]),
            names=json_text.strings(data.get("names", {})),
        )

    def has_same(self, gpus: Collection[model.Gpu]) -> bool:
        """Return whether these are the recorded GPUs, and all still have the layout."""
        return {gpu.uuid for gpu in gpus} == self.gpus.keys() and not self.differs(gpus)

    def differs(self, gpus: Iterable[model.Gpu]) -> bool:
        """Return whether one of these GPUs that had the layout has other instances now."""
        return any(self.gpus.get(gpu.uuid, "") not in ("", _fingerprint(gpu)) for gpu in gpus)

    def is_outdated(self, gpus: Iterable[model.Gpu], boot_id: str) -> bool:
        """Return whether a GPU lacks the layout, or may lack it: instances survive no reboot."""
        now = tuple(gpus)
        uuids = {gpu.uuid for gpu in now}
        has_returned = not uuids <= self.gpus.keys()
        is_unknown = boot_id != self.boot_id and uuids != self.gpus.keys()
        return has_returned or is_unknown or self.differs(now)


def _fingerprint(gpu: model.Gpu) -> str:
    """Return 12 hexadecimal digits that change with the MIG mode and the instances of a GPU."""
    rows = snapshot_codec.to_data([gpu.snapshot])
    rows[0]["instances"].sort(key=json.dumps)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:_HASH_DIGITS]
