"""``mig-manager agent``."""

from mig_manager.agent import agent_settings
from mig_manager.cli import registry
from mig_manager.cli.toolkit import console
from mig_manager.core.settings import node_settings

ABOUT = """
The agent watches the node label nvidia.com/mig.config and applies the layout named there:
it drains the affected pods, pauses the GPU clients, changes the GPUs, and reports
'success' once the new devices are schedulable. It runs until SIGTERM, and completes or
undoes a change before it exits.

Options and variables of NVIDIA's nvidia-mig-manager are accepted.

$ mig-manager agent --node-name node-1 --kubeconfig /etc/kubernetes/agent
On a host, with its own credentials.

$ mig-manager agent --drain-policy none --heal-drift
In a pod: evict no pod, and restore the layout after another program changed it.
"""
Settings = agent_settings.AgentSettings


def run(settings: Settings, terminal: console.Console) -> int:
    """Run the agent until SIGTERM; return its exit status."""
    import structlog

    from mig_manager.adapters.host import procfs
    from mig_manager.agent import main

    is_json = settings.log_format is node_settings.LogFormat.JSON
    terminal.configure_log(settings.log_level, is_debug=settings.is_debug, is_json=is_json)
    logger = structlog.get_logger()
    if settings.not_needed:
        logger.info("options_not_needed", options=settings.not_needed)
    unknown = registry.PROGRAM.unknown_variables(terminal.environ, "agent")
    for name, closest in unknown.items():
        logger.warning("variable_unknown", name=name, did_you_mean=closest or None)
    # Before the simulation: without a cluster, its log line would stand beside the error.
    kube = main.connect(settings)
    boot_id = procfs.boot_id()
    if settings.gpus.is_simulated:
        from mig_manager.cli import gpu_access

        state = str(settings.gpus.simulate_state)
        gpu_access.prepare_simulation(
            settings.gpus, lambda _: logger.warning("gpus_simulated", state=state)
        )
        boot_id = gpu_access.boot_id(settings.gpus)
    return main.run(settings, kube, boot_id=boot_id)
