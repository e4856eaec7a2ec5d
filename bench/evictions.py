"""Measure what admission policies add to an eviction in a large namespace, on a real API server.

    KUBEBUILDER_ASSETS=FOLDER python -m bench.evictions [--pods 4000] [--policy FILE ...]

Evicts pods as the agent and as an administrator, in rounds with and without the policies, and
prints the medians of one run. Exit status 1: an eviction takes over 1.2 times as long with them.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import yaml

from mig_manager.adapters.kubernetes import api, responses
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import account_rights, api_servers, deploy_files, envtest
from tests.rigs.stage import clusters

_SLOWEST = 1.2
_ROUNDS = 10
_EVICTIONS = 20  # by each user in each round
_UNCOUNTED = 10
"""At the start of a round, when the server has just compiled or dropped the policies."""
_WRITERS = 8
_NODE = f"/api/v1/nodes/{clusters.NODE}"
_PODS = "/api/v1/namespaces/default/pods"
_POD = {"nodeName": clusters.NODE, "containers": [{"name": "main", "image": "app:1"}]}


def main() -> None:
    """Start the server, evict pods, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, default=4000, help="in the namespace (default: 4000)")
    parser.add_argument(
        "--policy",
        type=pathlib.Path,
        nargs="+",
        default=[deploy_files.DEPLOY / "policy" / "policy.yaml"],
        help="files with the policies (default: deploy/policy/policy.yaml)",
    )
    options = parser.parse_args()
    objects = [
        each
        for path in options.policy
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    with tempfile.TemporaryDirectory(prefix="mig-") as name:
        folder = pathlib.Path(name)
        server = envtest.EnvtestServer(envtest.assets(), folder)
        with (
            server.running(),
            contextlib.closing(api_servers.EnvtestCluster(server, folder)) as real,
        ):
            real.grant(account_rights.SHIPPED)
            for each in deploy_files.manifest_objects("evictions/evictions.yaml"):
                real.kube.delete(_path(each))
            sys.exit(_run(server, real, folder, options.pods, objects))


def _run(
    server: envtest.EnvtestServer,
    real: api_servers.EnvtestCluster,
    folder: pathlib.Path,
    count: int,
    policies: Sequence[api_objects.Object],
) -> int:
    real.kube.post("/api/v1/nodes", {"metadata": {"name": clusters.NODE}})
    names = [f"pod-{number:05}" for number in range(count)]
    admin, agent, unbound = (
        _connect(server, path)
        for path in (
            server.kubeconfig(folder / "admin", token=envtest.ADMIN_TOKEN),
            real.kubeconfig(folder / "agent", account_rights.MANAGER, node=clusters.NODE),
            real.kubeconfig(folder / "unbound", account_rights.MANAGER),
        )
    )
    pods = [{"metadata": {"name": name}, "spec": _POD} for name in names]
    with concurrent.futures.ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(functools.partial(admin.post, _PODS), pods))
    users = {"agent": agent, "administrator": admin}
    times_s: dict[tuple[str, bool], list[float]] = collections.defaultdict(list)
    remaining = iter(names)
    for has_policies in itertools.islice(itertools.cycle((False, True)), _ROUNDS):
        _switch(admin, policies, unbound, is_on=has_policies)
        for user, kube in users.items():
            labels = api.LABELS if kube is agent else {}
            evicted = itertools.islice(remaining, _UNCOUNTED + _EVICTIONS)
            round_s = [_evict(kube, name, labels) for name in evicted]
            times_s[user, has_policies] += round_s[_UNCOUNTED:]
    ratios = list(_print(times_s, count))
    for kube in (admin, agent, unbound):
        kube.close()
    return int(max(ratios) > _SLOWEST)


def _connect(server: envtest.EnvtestServer, kubeconfig: pathlib.Path) -> api.KubeApi:
    """Return a client without the rate limit of ``api.KubeApi.connect``."""
    (user,) = yaml.safe_load(kubeconfig.read_text())["users"]
    configuration = api.Configuration()
    configuration.host = server.url
    configuration.ssl_ca_cert = str(server.certificate)
    configuration.api_key["BearerToken"] = f"Bearer {user['user']['token']}"
    return api.KubeApi(configuration, request_timeout_s=60)


def _print(times_s: dict[tuple[str, bool], list[float]], count: int) -> Iterator[float]:
    print(f"{count} pods in the namespace; milliseconds of an eviction, medians")
    print(f"{'':14} {'without':>8} {'with':>8} {'ratio':>6}")
    for user in dict.fromkeys(user for user, _ in times_s):
        without, with_ = (1000 * statistics.median(times_s[user, on]) for on in (False, True))
        print(f"{user:14} {without:8.1f} {with_:8.1f} {with_ / without:6.2f}")
        yield with_ / without


def _switch(
    admin: api.KubeApi,
    policies: Sequence[api_objects.Object],
    unbound: api.KubeApi,
    *,
    is_on: bool,
) -> None:
    """Create or delete the policies, and wait until the server applies that."""
    for each in policies:
        with contextlib.suppress(responses.ApiError):  # it exists, or is gone
            if is_on:
                admin.post(deploy_files.collection(each), each)
            else:
                admin.delete(_path(each))
    waiting.until(
        lambda: bool(clusters.refusal(lambda: unbound.patch(_NODE, {}))) is is_on,
        "the policies",
    )


def _path(thing: api_objects.Object) -> str:
    return f"{deploy_files.collection(thing)}/{thing['metadata']['name']}"


def _evict(kube: api.KubeApi, name: str, labels: Mapping[str, str]) -> float:
    began_s = time.perf_counter()
    # Only the agent's evictions have labels.
    metadata = {"name": name, "namespace": "default", "labels": labels}
    kube.post(f"{_PODS}/{name}/eviction", {"metadata": metadata})
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
