"""Which calls of the agent's ports change nothing."""

READS = frozenset(
    f"{port}.{method}" if method else port
    for port, methods in {
        "allocations": ("allocatable", "assigned_devices"),
        "verified_layout_file": ("read",),
        "layout_source": ("read",),
        "extra_clients": ("",),
        "gpus": ("observe",),
        "hooks": ("missing", "read", "variables"),
        "node": ("has_unwritten_condition", "latest", "read"),
        "processes": ("",),
        "reboot": ("check",),
        "host_copy_file": ("read",),
        "service_names": ("",),
        "services": ("may_have_stopped", "running"),
        "slices": ("list",),
        "workloads": (
            "budgets",
            "can_evict",
            "covered_by",
            "from_watch",
            "list",
            "present",
            "unbound",
        ),
    }.items()
    for method in methods
)
"""By the names of ``ports.Dependencies``; a port that is a mere function has only its own name.

An agent that is killed before one of them leaves the same node as one that is killed after it.
"""
