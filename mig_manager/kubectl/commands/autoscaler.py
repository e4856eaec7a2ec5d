"""``kubectl mig autoscaler-tags``: describe a node group without nodes to an autoscaler.

From a catalogue product and a layout, it computes the resources that a new node's device plugin
will advertise. It writes them in every autoscaler's format:

- Cluster Autoscaler on AWS: tags of the Auto Scaling group
  (kubernetes/autoscaler, cluster-autoscaler/cloudprovider/aws/README.md).
- Cluster Autoscaler on Azure: tags of the scale set, with ``_`` for ``/``
  (cloudprovider/azure/azure_template.go).
- Cluster Autoscaler on GCE: a part of ``AUTOSCALER_ENV_VARS`` in the instance template's
  ``kube-env`` (cloudprovider/gce/templates.go).
- Karpenter: ``spec.capacity`` of a NodeOverlay, which adds resources and replaces none
  (kubernetes-sigs/karpenter, pkg/apis/v1alpha1/nodeoverlay.go).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.cli.toolkit import console
from mig_manager.core import messages
from mig_manager.core.layout import layouts, selection
from mig_manager.core.node.devices import resources, strategies
from mig_manager.core.objects import well_known
from mig_manager.core.planner import planner
from mig_manager.core.settings import options
from mig_manager.kubectl import cluster_command, plugin_settings

if TYPE_CHECKING:
    from mig_manager.core.answers import node_answers

_LABELS, _RESOURCES = "label", "resources"


class Settings(
    plugin_settings.PluginSettings,
    takes=(
        "layout",
        "filename",
        "config-map",
        "output",
        "gpu",
        "strategy",
        *plugin_settings.COMMON,
    ),
):
    """Settings of ``autoscaler-tags``."""

    layout: str = options.declare(plugin_settings.LAYOUT)
    gpu: str | None = options.text(
        "the GPUs of a node, such as 8xA100-SXM4-40GB (required)", metavar=options.SPEC
    )
    strategy: strategies.Strategy = options.choice(
        "the device plugin's MIG strategy: mixed or single",
        metavar="STRATEGY",
        default=strategies.Strategy.MIXED,
        words=("mixed", "single"),
    )


def run(settings: Settings, terminal: console.Console) -> int:
    """Print the tags of a node group that scales from zero."""
    if not settings.gpu:
        raise errors.UsageError("--gpu is missing: name the GPUs of a node")
    if not well_known.LABEL_VALUE.fullmatch(settings.layout):
        problem = f"{settings.layout!r} is not a valid label value, so no node can request it"
        raise errors.UsageError(problem)
    command = cluster_command.ClusterCommand(settings, terminal)
    layout = command.document().layout(settings.layout)
    result = tags(layout, settings.gpu, settings.strategy)
    return command.answer(result.to_data, lambda: text(result), is_good=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The resources and labels of a node with these GPUs and this layout."""

    layout: str
    gpus: str  # as the user wrote them
    strategy: strategies.Strategy
    devices: Mapping[str, int]  # by resource; whole GPUs even if there is none

    @property
    def aws(self) -> dict[str, str]:
        """Tags of an Auto Scaling group."""
        return {
            f"k8s.io/cluster-autoscaler/node-template/{kind}/{key}": value
            for kind, key, value in self._facts()
        }

    @property
    def azure(self) -> dict[str, str]:
        """Tags of a scale set. No key has ``_``, which Azure's tags would write as ``~2``."""
        return {key.replace("/", "_"): value for key, value in self.aws.items()}

    @property
    def gce(self) -> str:
        """Entries of ``AUTOSCALER_ENV_VARS``."""
        variables = {_LABELS: "node_labels", _RESOURCES: "extended_resources"}
        return ";".join(
            f"{variable}="
            + ",".join(
                f"{key}={value}" for fact_kind, key, value in self._facts() if fact_kind == kind
            )
            for kind, variable in variables.items()
        )

    @property
    def karpenter(self) -> dict[str, str]:
        """``spec.capacity`` of a NodeOverlay."""
        return {name: str(count) for name, count in self.devices.items() if count}

    def _facts(self) -> Iterator[tuple[str, str, str]]:
        yield _LABELS, well_known.CONFIG_LABEL, self.layout
        for name, count in self.devices.items():
            # Write 0 too: from the instance type alone, the autoscaler expects whole GPUs.
            yield _RESOURCES, name, str(count)

    def to_data(self) -> "node_answers.AutoscalerTags":
        """Return plain data for JSON and YAML."""
        return {
            "kind": "AutoscalerTags",
            "layout": self.layout,
            "gpus": self.gpus,
            "strategy": self.strategy.value,
            "resources": dict(self.devices),
            "aws_tags": self.aws,
            "azure_tags": self.azure,
            "gce_autoscaler_env_vars": self.gce,
            "karpenter_capacity": self.karpenter,
        }


def tags(layout: layouts.Layout, spec: str, strategy: strategies.Strategy) -> Tags:
    """Compute the resources and labels of a new node.

    Raises:
        LayoutError: The layout does not fit the GPUs.
        UsageError: The GPUs are unknown, or the device plugin cannot serve the layout
            with this strategy.
    """
    from mig_manager.catalogue import hardware  # noqa: PLC0415 - reads the table of products

    gpus = [
        hardware.template(product, index)
        for index, product in enumerate(hardware.parse_node(spec))
    ]
    desired = selection.select(layout, gpus)
    planner.plan(gpus, desired)
    why_not = strategies.refusals(strategies.gpu_layouts(gpus, desired)).get(strategy)
    if why_not:
        raise errors.UsageError(
            f"with the MIG strategy {strategy.value} the device plugin exits: {why_not}"
        )
    return Tags(
        layout=messages.printable(layout.name),
        gpus=messages.printable(spec),
        strategy=strategy,
        devices=resources.desired_counts(gpus, desired, strategy),
    )


def text(result: Tags) -> str:
    """Return the tags for people."""
    return "\n".join(
        (
            f"{result.gpus} with layout {result.layout}, MIG strategy {result.strategy.value}",
            "",
            "Cluster Autoscaler on AWS, tags of the Auto Scaling group:",
            *_lines(result.aws),
            "",
            "Cluster Autoscaler on Azure, tags of the scale set:",
            *_lines(result.azure),
            "",
            "Cluster Autoscaler on GCE, in AUTOSCALER_ENV_VARS of the template's kube-env:",
            f"  {result.gce}",
            "",
            "Karpenter, spec.capacity of a NodeOverlay:",
            *(f'  {name}: "{count}"' for name, count in result.karpenter.items()),
        )
    )


def _lines(pairs: Mapping[str, str]) -> Iterator[str]:
    return (f"  {key}={value}" for key, value in pairs.items())
