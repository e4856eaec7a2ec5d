"""Read what a command needs from the cluster: nodes, their pods, Events, layouts."""

import contextlib
import dataclasses
import datetime as dt
import http
import json
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core import json_text, messages, options
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.layout import config
from mig_manager.core.node import cluster

_NODES = "/api/v1/nodes"
_PODS = "/api/v1/pods"
_EVENTS = "/api/v1/namespaces/default/events"
"""The API server keeps Events about objects without a namespace here."""
_MOST_NODE_QUERIES = 10  # for more nodes, all pods of the cluster are listed at once
_COMPONENT = "mig-manager"
OPERATOR_NAMESPACE = "gpu-operator"
_CONFIG_MAPS = (
    ("mig-manager", "mig-manager-config"),
    (OPERATOR_NAMESPACE, "mig-manager-config"),
    (OPERATOR_NAMESPACE, "default-mig-parted-config"),
)
"""Of our manifests, of ours with the GPU operator, and the operator's own."""
_DOCUMENT_KEY = "config.yaml"
_PROGRAMS = ("kubectl", "oc")
"""``oc`` of OpenShift runs kubectl plugins too, and has the same options."""
_TIMEOUT_S = 300.0
"""The user may have to log in with a browser; kubectl itself ends requests earlier."""
_REFUSAL = re.compile(r"Error from server(?: \((?P<reason>[A-Za-z]+)\))?: (?P<message>.*)")
_REFUSALS = {
    "NotFound": (http.HTTPStatus.NOT_FOUND, errors.Reason.API_ERROR),
    "Conflict": (http.HTTPStatus.CONFLICT, errors.Reason.API_ERROR),
    "Expired": (http.HTTPStatus.GONE, errors.Reason.API_ERROR),
    "Forbidden": (http.HTTPStatus.FORBIDDEN, errors.Reason.FORBIDDEN),
    "Unauthorized": (http.HTTPStatus.UNAUTHORIZED, errors.Reason.FORBIDDEN),
    "TooManyRequests": (http.HTTPStatus.TOO_MANY_REQUESTS, errors.Reason.API_UNAVAILABLE),
    "ServiceUnavailable": (http.HTTPStatus.SERVICE_UNAVAILABLE, errors.Reason.API_UNAVAILABLE),
}
"""By ``metav1.StatusReason``, as kubectl prints it; all others count as unavailable."""
_NOT_LOGGED_IN = re.compile(r"error: You must be logged in")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The nodes that a command is about."""

    reports: tuple[fleet_nodes.Report, ...]  # by name, never empty
    missing: tuple[str, ...]  # why nodes that were named are not among them

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(report.node.name for report in self.reports)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of nodes, or why they are not known."""

    by_node: Mapping[str, tuple[cluster.Pod, ...]] | None
    why_not: str = ""

    def of(self, name: str) -> tuple[cluster.Pod, ...] | None:
        """Return the pods of a node that request GPUs; None if they are not known."""
        return None if self.by_node is None else self.by_node.get(name, ())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to a node."""

    at: dt.datetime | None
    what: str  # the reason of an Event, or a word of ours in lower case
    message: str
    is_warning: bool = False
    count: int = 1


KUBECTL_OPTIONS = tuple(
    options.Option(
        name=name,
        metavar=metavar,
        help=meaning,
        short="s" if name == "server" else "",
        default_text="30s" if name == "request-timeout" else "",
        is_repeatable=name == "as-group",
        group="the cluster, as kubectl's own options",
        has_variable=False,
    )
    for name, metavar, meaning in (
        ("kubeconfig", options.FILE, "kubeconfig file"),
        ("context", "CONTEXT", "context of the kubeconfig"),
        ("cluster", options.NAME, "cluster of the kubeconfig"),
        ("user", options.NAME, "user of the kubeconfig"),
        ("as", options.NAME, "user to impersonate"),
        ("as-group", options.NAME, "group to impersonate; repeatable"),
        ("server", "ADDRESS", "address of the API server"),
        ("token", "TOKEN", "bearer token"),
        ("request-timeout", "TIME", "how long one request may take"),
        ("insecure-skip-tls-verify", "", "do not check the API server's certificate"),
    )
)
"""Options of kubectl's own, which are passed to it and may stand anywhere, as with kubectl."""


def kubectl_options(parsed: Mapping[str, object]) -> tuple[str, ...]:
    """Return the options that are kubectl's own, as it takes them."""
    found: list[str] = []
    for option in KUBECTL_OPTIONS:
        value = parsed.get(option.key)
        if not option.metavar:
            found += [f"--{option.name}"] if value else []
            continue
        values = value if isinstance(value, list) else [value]
        found += [f"--{option.name}={each}" for each in values if each is not None]
    if parsed.get("request_timeout") is None:
        found.append("--request-timeout=30s")
    return tuple(found)


class Cluster:
    """The Kubernetes API through the user's own ``kubectl``, which a plugin always has.

    kubectl knows its user's contexts, credential programs, proxies and impersonation. ``kubectl
    get --raw`` sends one GET and prints the response unchanged, so that the Kubernetes library,
    many times as large as the rest of the plugin, is not needed.

    Each request raises ``ClusterError`` if the API refused or does not answer, or if kubectl
    cannot connect: with reason FORBIDDEN for 401 and 403; ``status`` shows a 404.
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
        self._command = (program, *options)
        self._note = note
        self._timeout_s = timeout_s

    def find(self, names: Sequence[str], selector: str | None, *, now: dt.datetime) -> Found:
        """Report on the nodes named, or else on those that ``selected`` returns.

        Raises:
            ClusterError: None of the nodes named exists, or as each request.
            UsageError: Nodes are given by name and by selector, or nothing is selected.
        """
        if names and selector:
            raise errors.UsageError("name nodes or select them with -l, not both")
        nodes = [] if names else self.selected(selector)
        missing: list[str] = []
        for name in dict.fromkeys(names):
            try:
                found = self.get(cluster.api_path(_NODES, name))
                nodes.append(fleet_nodes.parse(found))
            except errors.ClusterError as error:
                if not error.is_not_found or len(names) == 1:
                    raise
                missing.append(error.message)
        if missing and not nodes:
            raise errors.ClusterError("; ".join(missing), reason=errors.Reason.API_ERROR)
        if not nodes:
            what = f"selector {selector!r}" if selector else "NVIDIA GPUs"
            raise errors.UsageError(
                f"the cluster has no node with {what}",
                remedy="See all labels with 'kubectl get nodes --show-labels'.",
            )
        ordered = sorted(nodes, key=lambda node: node.name)
        reports = tuple(fleet_nodes.report(node, now) for node in ordered)
        return Found(reports=reports, missing=tuple(missing))

    def selected(self, selector: str | None) -> list[fleet_nodes.Node]:
        """Return the nodes that a selector matches; None: those with GPUs."""
        query = {"labelSelector": selector} if selector else {}
        nodes = cluster.listed(self.get, _NODES, query, fleet_nodes.parse)
        return [node for node in nodes if selector or node.has_gpus]

    def pods(self, names: Sequence[str]) -> Pods:
        """Return the pods of nodes that request GPUs, or why they are not known."""
        selectors = [f"spec.nodeName={name}" for name in names]
        if len(names) > _MOST_NODE_QUERIES:
            selectors = ["spec.nodeName!="]
        by_node: dict[str, list[cluster.Pod]] = {name: [] for name in names}
        try:
            for selector in selectors:
                query = {"fieldSelector": selector}
                for pod in cluster.listed(self.get, _PODS, query, cluster.parse_pod):
                    if pod.node_name in by_node and (pod.gpu_resources or pod.has_claims):
                        by_node[pod.node_name].append(pod)
        except errors.ClusterError as error:
            return Pods(by_node=None, why_not=error.message)
        return Pods(by_node={name: tuple(pods) for name, pods in by_node.items()})

    def events(self, node_name: str) -> tuple[Moment, ...]:
        """Return the agent's Events about a node, in no order."""
        query = {"fieldSelector": f"involvedObject.kind=Node,involvedObject.name={node_name}"}
        return tuple(filter(None, cluster.listed(self.get, _EVENTS, query, _event)))

    def document(
        self, config_map: tuple[str, str] | None, default: config.Document | None = None
    ) -> config.Document:
        """Return the layouts.

        Args:
            config_map: Namespace and name of the ConfigMap; None: the first of the usual ones.
            default: The layouts if none of those exists.

        Raises:
            ClusterError: As each request.
            ConfigError: The ConfigMap's layout file is invalid.
            UsageError: None of the usual ones exists, and there is no ``default``.
        """
        for namespace, name in (config_map,) if config_map else _CONFIG_MAPS:
            source = f"ConfigMap {namespace}/{name}"
            path = cluster.api_path("/api/v1/namespaces", namespace, "configmaps", name)
            try:
                found = self.get(path)
            except errors.ClusterError as error:
                if error.is_not_found and not config_map:
                    continue
                raise
            with cluster.understood(source):
                data = cluster.strings(found.get("data"))
            if _DOCUMENT_KEY not in data and len(data) != 1:
                raise errors.ConfigError(
                    f"{source} has no entry {_DOCUMENT_KEY}",
                    remedy="Add this entry, or name another ConfigMap or a file (-f).",
                )
            text = data.get(_DOCUMENT_KEY, next(iter(data.values())))
            return config.parse(text, source=source)
        if default is not None:
            return default
        tried = ", ".join("/".join(each) for each in _CONFIG_MAPS)
        raise errors.UsageError(
            f"no ConfigMap with layouts found ({tried}); name one with --config-map, or a file "
            "with -f"
        )

    def contexts(self) -> tuple[str, ...]:
        """Return the contexts of the kubeconfig."""
        output = self._run(["config", "get-contexts", "--output=name"], "the kubeconfig")
        return tuple(output.decode(errors="replace").split())

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Get an object or a list."""
        url = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        answer = self._run(["get", "--raw", url], f"GET {path}")
        try:
            return json_text.parse_object(answer)
        except ValueError as error:
            raise errors.ClusterError(
                f"the answer to GET {path} is not a JSON object", reason=errors.Reason.API_ERROR
            ) from error

    def patch_node(self, name: str, change: Mapping[str, object]) -> None:
        """Merge a change into a node; status 409: it has not the ``resourceVersion`` of that."""
        patch = ["--type=merge", f"--patch={json.dumps(change)}", "--field-manager=kubectl-mig"]
        self._run(["patch", "node", name, *patch, "--output=name"], f"patching node {name}")

    def _run(self, arguments: Sequence[str], what: str) -> bytes:
        lines: list[str] = []
        with tempfile.TemporaryFile() as answer, contextlib.ExitStack() as undo:
            try:
                process = subprocess.Popen(  # noqa: S603 - no shell; options are kubectl's own
                    [*self._command, *arguments], stdout=answer, stderr=subprocess.PIPE
                )
            except OSError as error:
                raise errors.ClusterError(
                    f"{self._command[0]} cannot be run: {error.strerror}",
                    reason=errors.Reason.API_UNAVAILABLE,
                ) from error
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
            for raw in process.stderr or ():
                line = messages.printable(raw.decode(errors="replace").rstrip(), " ")
                if line.startswith(("Error ", "error: ", "The connection ", "Unable to ")):
                    lines.append(line)
                elif line:
                    # At once, because a login may wait for the user.
                    self._note(line)
            if process.wait() == 0:
                answer.seek(0)
                return answer.read()
        if is_late.is_set():
            lines = [f"kubectl did not end within {self._timeout_s:g} s"]
        raise _refused(what, lines[-1] if lines else "kubectl failed without a message")


def _event(item: Mapping[str, Any]) -> Moment | None:
    """Parse an Event; None if another component reported it."""
    source = (item.get("source") or {}).get("component")
    if _COMPONENT not in (item.get("reportingComponent"), source):
        return None
    series = item.get("series") or {}
    moments = (
        series.get("lastObservedTime"),
        item.get("lastTimestamp"),
        item.get("eventTime"),
        item["metadata"].get("creationTimestamp"),
    )
    return Moment(
        at=next(filter(None, map(messages.parse_time, moments)), None),
        what=messages.printable(str(item.get("reason") or "")),
        message=messages.fit(
            messages.printable(str(item.get("message") or ""), " "), messages.LONGEST_EVENT_BYTES
        ),
        is_warning=item.get("type") == "Warning",
        count=int(series.get("count") or item.get("count") or 1),
    )


def _refused(what: str, message: str) -> errors.ClusterError:
    refusal = _REFUSAL.match(message)
    if refusal is None:
        is_login = _NOT_LOGGED_IN.match(message)
        reason = errors.Reason.FORBIDDEN if is_login else errors.Reason.API_UNAVAILABLE
        return errors.ClusterError(f"{what}: {message}", reason=reason)
    unknown = None, errors.Reason.API_UNAVAILABLE
    status, reason = _REFUSALS.get(refusal["reason"] or "", unknown)
    return errors.ClusterError(refusal["message"], reason=reason, status=status)
