"""Queries of Prometheus' HTTP API about a range of time."""

import http
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

from mig_manager import errors

STEP_S = 60.0  # between two samples of an answer: pods that exist for less can be missing
_PART_S = 6 * 3600.0  # a part of the range: Prometheus returns at most 11,000 samples of a series
_TIMEOUT_S = 60.0
_MAX_BYTES = 256 << 20
_MAX_DETAIL = 200


def query_range(url: str, query: str, *, begin_s: float, end_s: float) -> Iterator[str]:
    """Yield the answers to a query, one for every few hours of the range.

    Times are seconds since 1970.

    Raises:
        UsageError: Prometheus cannot be reached, or refuses the query.
    """
    while begin_s < end_s:
        part_end_s = min(begin_s + _PART_S, end_s)
        values = {"query": query, "start": begin_s, "end": part_end_s, "step": STEP_S}
        yield _get(f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(values)}")
        begin_s = part_end_s


def _get(address: str) -> str:
    server = address.partition("/api/")[0]
    try:
        try:
            # The scheme is checked where the option is parsed.
            answer = urllib.request.urlopen(address, timeout=_TIMEOUT_S)  # noqa: S310
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            content: bytes = answer.read(_MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None) or error
        why = getattr(cause, "strerror", None) or cause
        raise errors.UsageError(
            f"cannot query Prometheus at {server}: {why}",
            remedy="Check the address, or save the answer to a file and name the file.",
        ) from error
    if answer.status != http.HTTPStatus.OK:
        detail = content[:_MAX_DETAIL].decode(errors="replace")
        raise errors.UsageError(
            f"Prometheus at {server} refused the query: {answer.status} {detail}"
        )
    if len(content) > _MAX_BYTES:
        raise errors.UsageError(
            f"Prometheus at {server} sent more than {_MAX_BYTES >> 20} MiB for six hours"
        )
    return content.decode(errors="replace")
