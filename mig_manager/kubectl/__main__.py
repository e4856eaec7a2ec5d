"""``python -m mig_manager.kubectl``, and the console scripts of the plugin."""

from mig_manager import early_interrupts


def main() -> None:
    """Run the command line of this process and exit with its status."""
    with early_interrupts.end_process():
        from mig_manager.kubectl import main as plugin  # noqa: PLC0415 - takes long
    plugin.main()


def complete() -> None:
    """Complete a command line for kubectl."""
    with early_interrupts.end_process():
        from mig_manager.kubectl import main as plugin  # noqa: PLC0415 - takes long
    plugin.complete()


if __name__ == "__main__":
    main()
