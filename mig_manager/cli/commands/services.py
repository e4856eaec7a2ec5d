"""``mig-manager agent`` and ``partitioner``, which run until SIGTERM."""
# ruff: noqa: PLC0415 - the agent saves memory by not loading the partitioner

from collections.abc import Mapping

from mig_manager.adapters import host
from mig_manager.agent import settings as agent_settings
from mig_manager.cli.toolkit import console, program
from mig_manager.core import node_settings


def agent(
    parsed: program.Parsed, terminal: console.Console, unknown_variables: Mapping[str, str]
) -> int:
    """Run the agent until SIGTERM; return its exit status."""
    chosen = agent_settings.agent_settings(parsed, terminal.environ)
    import structlog

    from mig_manager.adapters.host import procfs
    from mig_manager.agent import main

    is_json = chosen.log_format is node_settings.LogFormat.JSON
    terminal.configure_log(chosen.log_level, is_debug=chosen.is_debug, is_json=is_json)
    logger = structlog.get_logger()
    if chosen.not_needed:
        logger.info("options_not_needed", options=chosen.not_needed)
    for name, closest in unknown_variables.items():
        logger.warning("variable_unknown", name=name, did_you_mean=closest or None)
    boot_id = procfs.boot_id()
    if chosen.gpus.is_simulated:
        from mig_manager.cli.commands import gpu_access

        state = str(chosen.gpus.simulate_state)
        gpu_access.prepare_simulation(
            chosen.gpus, lambda _: logger.warning("gpus_simulated", state=state)
        )
        boot_id = gpu_access.boot_id(chosen.gpus)
    return main.run(chosen, boot_id=boot_id)


def partitioner(parsed: program.Parsed, terminal: console.Console) -> int:
    """Run the partitioner until SIGTERM, or simulate it once; return the exit status."""
    from mig_manager.partitioner import settings

    chosen = settings.partitioner_settings(parsed, terminal.environ)
    if chosen.simulated_nodes and chosen.simulated_pods:
        from mig_manager.cli.commands import simulation

        return simulation.run(chosen, terminal, host.SystemClock())
    from mig_manager.partitioner import main

    is_json = chosen.log_format is node_settings.LogFormat.JSON
    terminal.configure_log(chosen.log_level, is_debug=chosen.is_debug, is_json=is_json)
    return main.run(chosen)
