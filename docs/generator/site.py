"""Name version and repository in the site: a hook of MkDocs."""

from typing import Any

import mig_manager


def on_config(config: Any) -> Any:
    """Add the version to the title, and a link to the repository if PROJECT_URL has its address.

    The link is in the footer: for ``repo_url`` the theme would ask the host for the number of
    stars, and the site works without a network.
    """
    config["site_name"] = f"{config['site_name']} {mig_manager.__version__}"
    if url := config["extra"]["project_url"]:
        link = {"icon": "fontawesome/brands/git-alt", "link": url, "name": "Repository"}
        config["extra"]["social"] = [link]
    return config
