"""What ``boot`` answers to people; apart from the other answers, which take less to import."""

from mig_manager.change import boot


def restored(result: boot.Restored) -> str:
    """Return in one sentence what came back after a reboot."""
    if not result.layout:
        return "No layout is kept for the boot: nothing was done."
    if result.rounds:
        rest = ", but not everything of it" if result.problems else ""
        return f"Layout {result.layout} is back{rest}."
    if result.problems:
        return f"Layout {result.layout} did not come back in full: nothing was done."
    return f"Layout {result.layout} is in force as it was kept: nothing was done."
