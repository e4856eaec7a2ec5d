"""The user's own ``kubectl`` as a transport to the API server, which a plugin always has."""

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

from mig_manager import errors, reasons
from mig_manager.core import messages
from mig_manager.core.files import json_text
from mig_manager.core.objects import node_object

_PROGRAMS = ("kubectl", "oc")
"""``oc`` of OpenShift runs kubectl plugins too, and has the same options."""
_TIMEOUT_S = 300.0
"""The user may have to log in with a browser; kubectl itself ends requests earlier."""
_REFUSAL = re.compile(r"Error from server(?: \((?P<reason>[A-Za-z]+)\))?: (?P<message>.*)")
_REFUSALS = {
    "BadRequest": (http.HTTPStatus.BAD_REQUEST, reasons.Reason.API_ERROR),
    "NotFound": (http.HTTPStatus.NOT_FOUND, reasons.Reason.API_ERROR),
    "Conflict": (http.HTTPStatus.CONFLICT, reasons.Reason.API_ERROR),
    "Expired": (http.HTTPStatus.GONE, reasons.Reason.API_ERROR),
    "Forbidden": (http.HTTPStatus.FORBIDDEN, reasons.Reason.FORBIDDEN),
    "TooManyRequests": (http.HTTPStatus.TOO_MANY_REQUESTS, reasons.Reason.API_UNAVAILABLE),
    "ServiceUnavailable": (http.HTTPStatus.SERVICE_UNAVAILABLE, reasons.Reason.API_UNAVAILABLE),
}
"""By ``metav1.StatusReason``, as kubectl prints it; all others count as unavailable."""
_INVALID = re.compile(r'The (request|\S+ "[^"]*") is invalid')
"""How kubectl words status 422 (``checkErr`` of k8s.io/kubectl), which has no reason in it."""
_ERROR = re.compile(rf"Error |error: |The connection |Unable to |{_INVALID.pattern}")
_DRAIN_S = 1.0


class Kubectl:
    """Sends requests with ``kubectl``.

    ``kubectl get --raw`` sends one GET and prints the response unchanged. So the plugin does not
    need the Kubernetes library, which is many times larger than the plugin.

    Every request raises ``ClusterError`` as ``cluster_reader.Get``, also if kubectl cannot
    connect.
    """

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
            raise errors.UsageError(
                "kubectl is not found on the PATH",
                remedy="Install kubectl, or add its folder to the PATH.",
            )
        self.options = tuple(options)
        self._program = program
        self._note = note
        self._timeout_s = timeout_s

    def contexts(self) -> tuple[str, ...]:
        """Return the contexts of the kubeconfig."""
        output = self.run(["config", "get-contexts", "--output=name"], "the kubeconfig")
        return tuple(output.decode(errors="replace").splitlines())

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get an object or a list."""
        url = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        return self._run_for_object(["get", "--raw", url], f"GET {path}")

    def patch_node(self, name: str, version: str, patch: node_object.NodePatch) -> None:
        """Patch labels and annotations of one version of a node.

        Raises:
            ClusterError: The API refused, does not answer, or did not keep the patch; status 409:
                the node has changed since.
        """
        metadata = {
            "resourceVersion": version,
            "labels": patch.labels,
            "annotations": patch.annotations,
        }
        change = json.dumps({"metadata": metadata})
        options = ["--type=merge", f"--patch={change}", "--field-manager=kubectl-mig"]
        item = self._run_for_object(
            ["patch", "node", name, *options, "--output=json"], f"patching node {name}"
        )
        node_object.require_kept(patch, item)

    def _run_for_object(self, arguments: Sequence[str], what: str) -> dict[str, Any]:
        answer = self.run(arguments, what)
        try:
            return json_text.parse_object(answer)
        except ValueError as error:
            raise errors.ClusterError(
                f"the answer to {what} is not a JSON object", reason=reasons.Reason.API_ERROR
            ) from error

    def run(self, arguments: Sequence[str], what: str) -> bytes:
        """Return what kubectl prints for the arguments; an error names ``what`` was to be done."""
        lines: list[str] = []
        with tempfile.TemporaryFile() as answer:
            try:
                process = subprocess.Popen(  # noqa: S603 - no shell; options are kubectl's own
                    [self._program, *self.options, *arguments],
                    stdout=answer,
                    stderr=subprocess.PIPE,
                )
            except OSError as error:
                raise errors.ClusterError(
                    f"{self._program} cannot be run: {error.strerror}",
                    reason=reasons.Reason.API_UNAVAILABLE,
                ) from error

            def show(stderr: IO[bytes]) -> None:
                with stderr:
                    for raw in stderr:
                        line = messages.printable(raw.decode(errors="replace").rstrip(), " ")
                        if _ERROR.match(line):
                            lines.append(line)
                        elif line:
                            # At once, because a login may wait for the user.
                            self._note(line)

            # A program that kubectl has started for credentials may keep its stderr open.
            reader = threading.Thread(target=show, args=(process.stderr,), daemon=True)
            reader.start()
            try:
                process.wait(self._timeout_s)
                reader.join(_DRAIN_S)
            except subprocess.TimeoutExpired as error:
                raise refusal(what, f"kubectl did not end within {self._timeout_s:g} s") from error
            finally:
                # Also after an interrupt.
                process.kill()
                process.wait()
            if process.returncode == 0:
                answer.seek(0)
                return answer.read()
        raise refusal(what, lines[-1] if lines else "kubectl failed without a message")


def refusal(what: str, message: str) -> errors.ClusterError:
    """Return the error for a message that kubectl printed."""
    if _INVALID.match(message):
        return errors.ClusterError(
            message,
            reason=reasons.Reason.API_ERROR,
            status=http.HTTPStatus.UNPROCESSABLE_ENTITY,
        )
    match = _REFUSAL.match(message)
    if match is None:
        return errors.ClusterError(f"{what}: {message}", reason=reasons.Reason.API_UNAVAILABLE)
    unknown = None, reasons.Reason.API_UNAVAILABLE
    status, reason = _REFUSALS.get(match["reason"] or "", unknown)
    return errors.ClusterError(match["message"], reason=reason, status=status)
