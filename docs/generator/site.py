"""What the site has of its build: a hook of MkDocs."""

import os
from typing import Any

import mig_manager


def on_config(config: Any) -> Any:  # noqa: ANN401 - MkDocs' own, which has no types
    """Name the version, and the repository of ``PROJECT_URL`` as releases do.

    The address is a link in the footer: with ``repo_url`` the theme would ask the host for the
    number of stars, and the site works without a network.
    """
    config["site_name"] = f"{config['site_name']} {mig_manager.__version__}"
    if url := os.environ.get("PROJECT_URL"):
        config["extra"]["social"] = [
            {"icon": "fontawesome/brands/git-alt", "link": url, "name": "Repository"}
        ]
    return config
