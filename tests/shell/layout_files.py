"""Layout files with one rule a layout."""


def layouts(**rules: str) -> str:
    """A document with layouts of one rule each, in flow style."""
    body = "".join(f"  {name}:\n  - {{{rule}}}\n" for name, rule in rules.items())
    return f"version: v1\nmig-configs:\n{body}"


def instances(devices: str) -> str:
    return f"devices: all, mig-enabled: true, mig-devices: {{{devices}}}"


SEVEN = instances("1g.5gb: 7")
NOWHERE = instances("1g.7gb: 1")  # no product has the profile
