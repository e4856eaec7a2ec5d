"""``mig-manager partitioner``."""

from mig_manager.cli.toolkit import console
from mig_manager.core.settings import node_settings
from mig_manager.partitioner import partitioner_settings

ABOUT = """
One Deployment for the cluster. It watches pods that wait for nvidia.com/mig-* resources,
and requests layouts for nodes labelled mig-manager.io/partitioning=on-demand. It never
destroys an instance in use: the node's agent, which needs --custom-layouts, decides. By
default it only recommends, in Events and metrics.

$ mig-manager partitioner --kubeconfig ~/.kube/config
Report what it would do; change nothing.

$ mig-manager partitioner --mode act --reserve 1g.5gb=2 --max-unavailable 25%
Do it on a quarter of the opted-in nodes at a time, and keep two 1g.5gb on every node.

$ mig-manager partitioner --simulate nodes.json pods.json
Print what it would do, for files from 'kubectl get -o json'.

$ mig-manager partitioner --simulate nodes.json pods.json --replay
Replay the last week's pods with it, and without it on the present layouts.
"""
Settings = partitioner_settings.PartitionerSettings


def run(settings: Settings, terminal: console.Console) -> int:
    """Run the partitioner until SIGTERM, or simulate it once; return the exit status."""
    if settings.simulated_nodes and settings.simulated_pods:
        from mig_manager.adapters import host
        from mig_manager.cli.commands import simulation

        return simulation.run(settings, terminal, host.SystemClock())
    from mig_manager.partitioner import main

    is_json = settings.log_format is node_settings.LogFormat.JSON
    terminal.configure_log(settings.log_level, is_debug=settings.is_debug, is_json=is_json)
    return main.run(settings)
