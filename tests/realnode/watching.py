"""Every version of the nodes that the API server hands out, in order."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

from tests.realnode import contract_keys, real_cluster

_COLUMNS = (
    "{.metadata.name}",
    r"{.metadata.labels.nvidia\.com/mig\.config}",
    r"{.metadata.labels.nvidia\.com/mig\.config\.state}",
    "{.spec.taints[*].key}",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """What stories about many nodes look at."""

    layout: str
    state: str
    taints: frozenset[str]

    @property
    def is_tainted(self) -> bool:
        """Whether the agent keeps pods away."""
        return contract_keys.RECONFIGURING_TAINT in self.taints


@dataclasses.dataclass(frozen=True, slots=True)
class NodeWatch:
    """A watch of all nodes."""

    _lines: IO[str]

    def most_at_once(self, counts: Callable[[Version], bool]) -> int:
        """Return how many nodes at most had a property at the same time so far."""
        self._lines.seek(0)
        current: dict[str, bool] = {}
        most = 0
        for line in self._lines:
            name, requested, state, taints = line.rstrip("\n").split("|")
            current[name] = counts(Version(requested, state, frozenset(taints.split())))
            most = max(most, sum(current.values()))
        return most


@contextlib.contextmanager
def nodes(cluster: real_cluster.RealCluster) -> Iterator[NodeWatch]:
    """Watch all nodes during the body."""
    columns = "|".join(_COLUMNS)
    with (
        tempfile.TemporaryFile("w+") as lines,
        cluster.running_kubectl(
            *("get", "nodes", "--watch", f"--output=jsonpath={columns}{{'\\n'}}"), output=lines
        ),
    ):
        yield NodeWatch(lines)
