"""Adds the project's URLs to its metadata where the variable PROJECT_URL names the repository.

Hatchling runs it at each build (``tool.hatch.metadata.hooks`` in ``pyproject.toml``). Who releases
a fork sets another address, and a build without the variable claims none. A source archive keeps
the URLs it was made with.
"""

import os
import urllib.parse
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """The hook; hatchling finds it by its base class."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``project.urls``.

        Raises:
            ValueError: PROJECT_URL is no address of a repository.
        """
        address = os.environ.get("PROJECT_URL", "")  # noqa: TID251 - a build, not the program
        # Hatchling has read those of a source archive from its PKG-INFO.
        if address and not metadata.get("urls"):
            metadata["urls"] = urls(address, metadata["version"])


def urls(address: str, version: str) -> dict[str, str]:
    """Return the URLs of a version by their labels.

    The labels are those that PyPI knows (packaging.python.org, "Well-known Project URLs").

    Args:
        address: Of the repository, such as ``https://github.com/OWNER/mig-manager``.
        version: Of the project.

    Raises:
        ValueError: The address is not one of a repository.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "https" or not parts.netloc or not parts.path.strip("/"):
        raise ValueError(f"PROJECT_URL must be https://HOST/OWNER/REPOSITORY, and is {address!r}")
    address = address.rstrip("/")
    return {
        "Source": address,
        "Documentation": f"{address}/tree/v{version}/docs",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
        "Releases": f"{address}/releases",
    }
