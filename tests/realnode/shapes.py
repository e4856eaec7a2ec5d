"""Shapes of clusters that several modules take: the same one goes on from module to module."""

from tests.realnode import manifests, rig

_LAYOUTS = """
  one-slice:
  - devices: [0]
    mig-enabled: true
    mig-devices: {1g.5gb: 5, 2g.10gb: 1}
  - devices: [1]
    mig-enabled: true
    mig-devices: {1g.5gb: 7}
  too-much:
  - devices: all
    mig-enabled: true
    mig-devices: {3g.20gb: 3}
"""

CONFIGURED = rig.Shape(
    patches=(
        manifests.layouts(_LAYOUTS),
        manifests.settings(
            MIG_MANAGER_PLUGIN_TIMEOUT_S="30",
            MIG_MANAGER_PLUGIN_CONFIGS="all-1g.10gb=shared,all-4g.20gb=whole",
        ),
    )
)
"""One node with layouts and settings of its owner."""
