"""The Kubernetes API through the user's own ``kubectl``, which a plugin always has.

kubectl knows its user's contexts, credential programs, proxies and impersonation. ``kubectl get
--raw`` sends one GET and prints the response unchanged, so that the Kubernetes library, many times
as large as the rest of the plugin, is not needed.
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
"""``oc`` of OpenShift runs kubectl plugins too, and has the same options."""
_TIMEOUT_S = 300.0
"""The user may have to log in with a browser; kubectl itself ends requests earlier."""
_REFUSAL = re.compile(r"Error from server(?: \((?P<reason>[A-Za-z]+)\))?: (?P<message>.*)")
_STATUS = {
    "NotFound": http.HTTPStatus.NOT_FOUND,
    "Forbidden": http.HTTPStatus.FORBIDDEN,
    "Unauthorized": http.HTTPStatus.UNAUTHORIZED,
    "Expired": http.HTTPStatus.GONE,
    "TooManyRequests": http.HTTPStatus.TOO_MANY_REQUESTS,
    "ServiceUnavailable": http.HTTPStatus.SERVICE_UNAVAILABLE,
}
"""``metav1.StatusReason``, as kubectl prints it; those with a meaning here."""
_NOT_LOGGED_IN = re.compile(r"error: You must be logged in")


class Kubectl:
    """Reads from the API server through kubectl."""

    def __init__(
        self,
        options: Sequence[str],
        *,
        note: Callable[[str], object],
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Find kubectl.

        Args:
            options: For every call: cluster and user.
            note: Shows what kubectl prints besides results, such as the prompt of a login.
            timeout_s: After how long kubectl is killed.

        Raises:
            UsageError: kubectl is not installed.
        """
        program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        if program is None:
            raise errors.UsageError("kubectl is not found on the PATH")
        self._command = (program, *options)
        self._note = note
        self._timeout_s = timeout_s

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get an object or a list.

        Raises:
            ClusterError: The API refused or does not answer, or kubectl cannot connect.
                FORBIDDEN for 401 and 403; ``status`` shows a 404.
        """
        url = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        answer = self._run(["get", "--raw", url], f"GET {path}")
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise _error(
                f"the answer to GET {path} is not JSON", errors.Reason.API_ERROR
            ) from error
        if not isinstance(document, dict):
            raise _error(f"the answer to GET {path} is not an object", errors.Reason.API_ERROR)
        return document

    def contexts(self) -> tuple[str, ...]:
        """Return the contexts of the kubeconfig.

        Raises:
            ClusterError: kubectl cannot read it.
        """
        output = self._run(["config", "get-contexts", "--output=name"], "the kubeconfig")
        return tuple(output.decode(errors="replace").split())

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

            def kill() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(self._timeout_s, kill)
            timer.daemon = True
            timer.start()
            undo.callback(timer.cancel)
            # Also after an interrupt.
            undo.callback(process.kill)
            lines = self._error_lines(process.stderr)
            if process.wait() != 0:
                late = [f"kubectl did not end within {self._timeout_s:g} s"]
                raise _refused(what, late if is_late.is_set() else lines)
            answer.seek(0)
            return answer.read()

    def _error_lines(self, stderr: IO[bytes] | None) -> list[str]:
        """Return the error lines; show others at once, because a login may wait for the user."""
        lines: list[str] = []
        for raw in stderr or ():
            line = messages.printable(raw.decode(errors="replace").rstrip(), " ")
            if line.startswith(("Error ", "error: ", "The connection ", "Unable to ")):
                lines.append(line)
            elif line:
                self._note(line)
        return lines


def _refused(what: str, lines: Sequence[str]) -> errors.ClusterError:
    last = lines[-1] if lines else "kubectl failed without a message"
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
    return _error(refusal["message"], reason, status=status)


def _error(
    message: str, reason: errors.Reason, *, status: int | None = None
) -> errors.ClusterError:
    return errors.ClusterError(message, reason=reason, status=status)
