"""A cluster of some nodes, and a person who rolls layouts out over them."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mig_manager.core.layout import available_layouts, layout_list
from mig_manager.core.objects import well_known
from mig_manager.core.records import inventory_codec
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.fleet import fake_agents
from tests.rigs import api_objects, waiting
from tests.rigs.node import gpu_values
from tests.rigs.node.agents import LAYOUTS_TEXT
from tests.rigs.shell import commandline
from tests.rigs.shell.commandline import Answer
from tests.rigs.stage import whole_agents

LAYOUT = "all-1g.5gb"
_NO_VARIABLES: Mapping[str, str] = {}


@dataclasses.dataclass
class RolloutRig:
    """A cluster of some nodes, and a person who asks."""

    server: apiserver.ApiServer
    kubeconfig: pathlib.Path
    names: list[str]
    agents: fake_agents.FakeAgents

    def __call__(
        self, *argv: str, is_terminal: bool = False, variables: Mapping[str, str] = _NO_VARIABLES
    ) -> Answer:
        options = ["rollout", *argv, "--kubeconfig", str(self.kubeconfig)]
        stdout = commandline.Terminal() if is_terminal else None
        return commandline.run(options, {"TERM": "xterm", **variables}, stdout=stdout)

    def roll(self, *argv: str) -> Answer:
        return self(*argv, "-l", "gpu=yes", "--max-unavailable", "2", "-o", "json")

    def metadata(self, name: str) -> dict[str, Any]:
        node_metadata: dict[str, Any] = self.server.get(kinds.NODES, name)["metadata"]
        return node_metadata

    def label(self, name: str) -> str | None:
        value: str | None = self.metadata(name)["labels"].get(well_known.CONFIG_LABEL)
        return value

    def labels(self) -> dict[str, str | None]:
        return {name: self.label(name) for name in self.names}

    def apply(self, layout: str, names: Sequence[str]) -> None:
        """Have nodes in a layout, as a person had it before."""
        whole_agents.label_all(self.server, names, layout)
        waiting.until(
            lambda: all(whole_agents.is_applied(self.server, name, layout) for name in names),
            layout,
        )

    def publish_gpus(self, name: str, product: str, count: int = 1) -> None:
        gpus = gpu_values.gpus_of(f"{count}x{product}")
        self.write(name, annotations={well_known.GPUS_ANNOTATION: inventory_codec.to_json(gpus)})

    def write(self, name: str, **metadata: Mapping[str, str] | None) -> None:
        """Merge labels or annotations into those of a node; None removes them all."""
        self.server.merge(kinds.NODES, name, {"metadata": metadata})

    def list_layouts(self, name: str) -> None:
        """Let a node list the layouts that its agent generates for the published GPUs."""
        gpus = inventory_codec.from_json(
            self.metadata(name)["annotations"][well_known.GPUS_ANNOTATION]
        )
        listed = layout_list.to_json(
            map(layout_list.Entry.of, available_layouts.generate(gpus).values())
        )
        self.write(name, annotations={well_known.LAYOUTS_ANNOTATION: listed})

    def layout_file(self, text: str = LAYOUTS_TEXT) -> str:
        """Write the person's own layouts; return the path of the file."""
        file = self.kubeconfig.with_name("layouts.yaml")
        file.write_text(text)
        return str(file)

    def serve_config(
        self, place: str = "mig-manager/mig-manager-config", text: str = LAYOUTS_TEXT
    ) -> None:
        self.server.store.create(api_objects.a_config_map(text, place))


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[RolloutRig]:
    """Have a cluster of five nodes with agents, and one outside their selector."""
    with apiserver.serve() as server:
        names = whole_agents.populate(server, 5, gpu="yes")
        server.store.create(api_objects.a_node("other"))
        played = fake_agents.FakeAgents(server, names, work_s=0.02)
        with fake_agents.running(played):
            yield RolloutRig(server, server.kubeconfig(folder / "kubeconfig"), names, played)
