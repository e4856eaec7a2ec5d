"""The Kubernetes API as a person's own ``kubectl`` reaches it.

A plugin is started by kubectl, so kubectl is there, and it knows every way into a cluster that
its user has: contexts, credential programs, proxies, impersonation. ``kubectl get --raw`` sends
one GET and writes the answer as it came, which is all that looking takes; the Kubernetes library,
many times as large as everything else here, is not needed.
"""

import contextlib
import http
import json
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from mig_manager import errors
from mig_manager.core import messages

_PROGRAMS = ("kubectl", "oc")
"""OpenShift's client runs plugins of kubectl too, and takes the same options."""
_TIMEOUT_S = 300.0
"""A person may have to log in with a browser meanwhile; kubectl itself ends requests earlier."""
_REFUSAL = re.compile(r"Error from server(?: \((?P<reason>[A-Za-z]+)\))?: (?P<why>.*)")
_STATUS = {
    "NotFound": http.HTTPStatus.NOT_FOUND,
    "Forbidden": http.HTTPStatus.FORBIDDEN,
    "Unauthorized": http.HTTPStatus.UNAUTHORIZED,
    "Expired": http.HTTPStatus.GONE,
    "TooManyRequests": http.HTTPStatus.TOO_MANY_REQUESTS,
    "ServiceUnavailable": http.HTTPStatus.SERVICE_UNAVAILABLE,
}
"""``metav1.StatusReason``, as kubectl prints it; those that matter here."""
_NOT_LOGGED_IN = re.compile(r"error: You must be logged in")


class Kubectl:
    """Asks the API server by way of kubectl."""

    def __init__(
        self,
        options: Sequence[str],
        *,
        tell: Callable[[str], object],
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Find kubectl.

        Args:
            options: For every call: which cluster, and as whom.
            tell: Takes what kubectl says beside answers, such as the prompt of a login.
            timeout_s: After how long a call is given up.

        Raises:
            UsageError: There is none.
        """
        program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if program is None:
            raise errors.UsageError("there is no kubectl on the PATH, and it does the talking")
        self._command = (program, *options)
        self._tell = tell
        self._timeout_s = timeout_s

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Read an object or a list.

        Raises:
            ClusterError: The API refused or does not answer, or kubectl cannot reach it. FORBIDDEN
                for 401 and 403; ``status`` tells a 404.
        """
        asked = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        answer = self._run(["get", "--raw", asked], f"GET {path}")
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise _error(
                f"the answer to GET {path} is no JSON", errors.Reason.API_ERROR
            ) from error
        if not isinstance(document, dict):
            raise _error(f"the answer to GET {path} is no object", errors.Reason.API_ERROR)
        return document

    def contexts(self) -> tuple[str, ...]:
        """Return the contexts of the kubeconfig.

        Raises:
            ClusterError: kubectl cannot read it.
        """
        told = self._run(["config", "get-contexts", "--output=name"], "the kubeconfig")
        return tuple(told.decode(errors="replace").split())

    def _run(self, arguments: Sequence[str], what: str) -> bytes:
        with tempfile.TemporaryFile() as answer, contextlib.ExitStack() as undo:
            try:
                process = subprocess.Popen(  # noqa: S603 - no shell; options are kubectl's own
                    [*self._command, *arguments], stdout=answer, stderr=subprocess.PIPE
                )
            except OSError as error:
                message = f"{self._command[0]} cannot be run: {error.strerror}"
                raise _error(message, errors.Reason.API_UNAVAILABLE) from error
            undo.enter_context(process)
            is_late = threading.Event()

            def give_up() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(self._timeout_s, give_up)
            timer.daemon = True
            timer.start()
            undo.callback(timer.cancel)
            # Whatever interrupts us must not leave it behind.
            undo.callback(process.kill)
            said = self._listen(process.stderr)
            if process.wait() != 0:
                late = [f"kubectl has not come back for {self._timeout_s:g} s"]
                raise _refused(what, late if is_late.is_set() else said)
            answer.seek(0)
            return answer.read()

    def _listen(self, stderr: IO[bytes] | None) -> list[str]:
        """Pass on what is not the end of it at once: a login may wait for its reader."""
        said: list[str] = []
        for raw in stderr or ():
            line = messages.printable(raw.decode(errors="replace").rstrip(), " ")
            if line.startswith(("Error ", "error: ", "The connection ", "Unable to ")):
                said.append(line)
            elif line:
                self._tell(line)
        return said


def _refused(what: str, said: Sequence[str]) -> errors.ClusterError:
    last = said[-1] if said else "kubectl failed and does not say why"
    refusal = _REFUSAL.match(last)
    if refusal is None:
        is_login = _NOT_LOGGED_IN.match(last)
        reason = errors.Reason.FORBIDDEN if is_login else errors.Reason.API_UNAVAILABLE
        return _error(f"{what}: {last}", reason)
    status = _STATUS.get(refusal["reason"] or "")
    if status in (http.HTTPStatus.FORBIDDEN, http.HTTPStatus.UNAUTHORIZED):
        reason = errors.Reason.FORBIDDEN
    elif status is None or status >= http.HTTPStatus.TOO_MANY_REQUESTS:
        reason = errors.Reason.API_UNAVAILABLE
    else:
        reason = errors.Reason.API_ERROR
    return _error(refusal["why"], reason, status=status)


def _error(
    message: str, reason: errors.Reason, *, status: int | None = None
) -> errors.ClusterError:
    return errors.ClusterError(message, reason=reason, status=status)
