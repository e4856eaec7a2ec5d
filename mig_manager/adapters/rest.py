"""Paths and paged lists of the Kubernetes API, over any transport."""

import http
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from mig_manager import errors, reasons
from mig_manager.core.objects import api_values

_PAGE = 500
_MAX_PAGES = 1000
_Item = TypeVar("_Item")


def api_path(root: str, *parts: str) -> str:
    """Return a path of the Kubernetes API below ``root``, such as ``/api/v1``; names escaped."""
    return "/".join([root, *(urllib.parse.quote(part, safe="") for part in parts)])


def pages(
    get: Callable[[str, Mapping[str, str]], Mapping[str, Any]],
    path: str,
    query: Mapping[str, str],
    *,
    what: str,
) -> Iterator[Mapping[str, Any]]:
    """Yield each page of a list: an object with ``items`` and ``metadata``.

    Without ``resourceVersion`` in the query the list is as new as etcd's at the time of the
    request: the API server reads etcd or, since 1.31, its watch cache once that has caught up
    (KEP-2340).
    ``what`` names the list in a ClusterError about a malformed page or a repeated one.
    """
    token = ""
    for _ in range(_MAX_PAGES):
        more = {"continue": token} if token else {}
        page = get(path, {**query, "limit": str(_PAGE), **more})
        with api_values.as_cluster_error(what):
            following = str((page.get("metadata") or {}).get("continue") or "")
        yield page
        if not following:
            return
        if following == token:
            break
        token = following
    raise errors.ClusterError(f"{what} does not end", reason=reasons.Reason.API_ERROR)


def list_items(
    get: Callable[[str, Mapping[str, str]], Mapping[str, Any]],
    path: str,
    query: Mapping[str, str],
    parse: Callable[[Mapping[str, Any]], _Item],
) -> list[_Item]:
    """Return the parsed items of a list; ClusterError if one is malformed.

    If its continue token expires between two pages, the list begins again, once.
    """
    what = f"the list of {path.rpartition('/')[2]}"

    def read() -> list[_Item]:
        items: list[_Item] = []
        for page in pages(get, path, query, what=what):
            with api_values.as_cluster_error(what):
                items += map(parse, page["items"] or ())
        return items

    try:
        return read()
    except errors.ClusterError as error:
        if error.status != http.HTTPStatus.GONE:
            raise
        return read()
