"""``mig-manager rollout``."""

from mig_manager.cli.rollout import rollout_settings
from mig_manager.cli.toolkit import console

ABOUT = """
Uses your credentials for the cluster. It labels nodes, waits for their agents, and
respects the limit of unavailable nodes. All state is on the nodes: after an
interruption the same command continues.

$ mig-manager rollout all-balanced -l pool=a100 --dry-run
The cost on every node: pods, instances, resets.

$ mig-manager rollout all-balanced -l pool=a100 --max-unavailable 10% --pause-on-failure
A tenth of the nodes at a time, until one fails.

$ mig-manager rollout undo -l pool=a100
Restore every node's previous request, one node at a time.

exit 0: every node has the layout; with --dry-run: can have it

exit 1: a node does not have it; with --dry-run: cannot have it, or that is unknown

exit 2: wrong usage, an unusable file, or no node can have the layout; nothing was changed
"""
Settings = rollout_settings.RolloutSettings


def run(settings: Settings, terminal: console.Console) -> int:
    """Roll out a layout, or preview it."""
    from mig_manager.cli.rollout import rollout_run

    return rollout_run.run(settings, terminal)
