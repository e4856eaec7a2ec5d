"""``mig-manager agent`` and ``partitioner``, which run until SIGTERM."""
# ruff: noqa: PLC0415 - the agent saves memory by not loading the partitioner

from collections.abc import Mapping

from mig_manager.agent import settings as agent_settings
from mig_manager.cli.toolkit import console, program
from mig_manager.core import node_settings

_MOST_BYTES = 1 << 30  # of a file with the objects of a cluster


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
        import datetime as dt

        from mig_manager.adapters.host import files
        from mig_manager.partitioner import simulation

        report = simulation.simulate(
            files.ConfigFile(chosen.simulated_nodes, most_bytes=_MOST_BYTES).read(),
            files.ConfigFile(chosen.simulated_pods, most_bytes=_MOST_BYTES).read(),
            chosen.limits,
            now=dt.datetime.now(dt.UTC),
            is_mix=chosen.is_mix,
            selects=chosen.selects,
        )
        style = terminal.style(chosen.colour)
        terminal.answer(chosen.output_format.value, report.to_data, lambda: report.text(style))
        return console.DONE
    from mig_manager.partitioner import main

    is_json = chosen.log_format is node_settings.LogFormat.JSON
    terminal.configure_log(chosen.log_level, is_debug=chosen.is_debug, is_json=is_json)
    return main.run(chosen)
