"""Who holds a GPU, in words and as data."""

import dataclasses


def program(command: str) -> str:
    """Return the program's bare name of a command line; empty when it has none."""
    return command.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds a GPU, by NVML's lists, by its open files, or by both."""

    pid: int
    name: str
    home: str
    """``pod UID`` or ``unit NAME.service``; empty when it cannot be told."""
    gpu_instances: tuple[int, ...]
    """Ids of the GPU instances that it holds; empty when it holds the GPU itself."""

    def __str__(self) -> str:
        where = ", ".join(f"GPU instance {each}" for each in self.gpu_instances)
        told = ", ".join(filter(None, (f"pid {self.pid}", where, self.home)))
        return f"{self.name} ({told})"

    def to_data(self) -> dict[str, object]:
        """Return plain data for JSON and YAML."""
        kind, _, name = self.home.partition(" ")
        return {
            "pid": self.pid,
            "name": self.name,
            "gpu_instances": list(self.gpu_instances),
            "pod_uid": name if kind == "pod" else None,
            "unit": name if kind == "unit" else None,
        }
