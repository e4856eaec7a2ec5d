"""Label many nodes at once, whose agents use one real kube-apiserver.

    KUBEBUILDER_ASSETS=FOLDER python -m bench.many_agents [--nodes 200]

One process hosts all agents, each with a watch, a client and a pipeline of its own. Their GPUs are
values in memory, so this measures the load of the API server and ours.
"""

import argparse
import collections
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
import urllib3

from mig_manager.adapters.host import line_writer, log, process
from mig_manager.adapters.kubernetes import api
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from tests.rigs import waiting
from tests.rigs.cluster import envtest
from tests.rigs.stage import in_process, whole_agents

_LAYOUT = "all-1g.5gb"


def main() -> None:
    """Start the server and the agents, label all nodes, and print the load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200, help="how many (default: 200)")
    count = parser.parse_args().nodes
    log.configure(level="error", is_json=False, lines=line_writer.LineWriter(sys.stderr))
    with tempfile.TemporaryDirectory(prefix="mig-") as name:
        folder = pathlib.Path(name)
        server = envtest.EnvtestServer(envtest.assets(), folder)
        with server.running():
            kubeconfig = server.kubeconfig(folder / "kubeconfig", token=envtest.ADMIN_TOKEN)
            _run(server, str(kubeconfig), count, folder)


def _run(server: envtest.EnvtestServer, kubeconfig: str, count: int, folder: pathlib.Path) -> None:
    admin = api.KubeApi.connect(kubeconfig=kubeconfig)
    names = [f"node-{number:03}" for number in range(count)]
    for name in names:
        admin.post("/api/v1/nodes", {"metadata": {"name": name}})
    hosted = [in_process.new_agent(**_ports(kubeconfig, name, folder)) for name in names]
    for one in hosted:
        threading.Thread(target=one.serve, daemon=True).start()
    waiting.until(lambda: _watches(server) >= count, "all watches")
    idle = _requests(server)
    threading.Event().wait(10.0)
    print(f"{count} agents at rest for 10 s: {(_requests(server) - idle).total()} requests")
    before, cpu, began = _requests(server), _cpu_s(server), time.monotonic()
    for name in names:
        change = {"metadata": {"labels": {well_known.CONFIG_LABEL: _LAYOUT}}}
        admin.patch(f"/api/v1/nodes/{name}", change)
    labelled = time.monotonic()
    waiting.until(lambda: _applied_count(admin) == count, "success on every node")
    end = time.monotonic()
    requests = _requests(server) - before
    print(f"labelled in {labelled - began:.1f} s, all active {end - began:.1f} s after begin")
    print(f"kube-apiserver used {_cpu_s(server) - cpu:.1f} s of CPU")
    for (verb, resource), number in requests.most_common(8):
        print(f"  {number:6}  {verb} {resource}  ({number / count:.1f} a node)")
    for one in hosted:
        one.stop()


def _ports(kubeconfig: str, name: str, folder: pathlib.Path) -> dict[str, Any]:
    how = whole_agents.in_memory(
        name,
        folder,
        config_file=str(process.packaged_config()),
        retry_initial_s="1.0",
        retry_max_s="5.0",
    )
    return {"kube": api.KubeApi.connect(kubeconfig=kubeconfig), **how}


def _applied_count(admin: api.KubeApi) -> int:
    success = run_status.State.SUCCESS.value
    selector = f"{well_known.APPLIED_LABEL}={_LAYOUT},{well_known.STATE_LABEL}={success}"
    return len(admin.get("/api/v1/nodes", {"labelSelector": selector})["items"])


def _scrape(server: envtest.EnvtestServer) -> str:
    headers = {"Authorization": f"Bearer {envtest.ADMIN_TOKEN}"}
    with urllib3.PoolManager(ca_certs=str(server.certificate)) as http:
        return http.request("GET", f"{server.url}/metrics", headers=headers).data.decode()


def _requests(server: envtest.EnvtestServer) -> collections.Counter[tuple[str, str]]:
    """Count finished requests by verb and resource, without the server's to itself."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for labels, number in re.findall(
        r"^apiserver_request_total\{(.*?)\} (\S+)", _scrape(server), re.MULTILINE
    ):
        fields = dict(re.findall(r'(\w+)="(.*?)"', labels))
        if fields["resource"] in ("nodes", "pods", "events"):
            counts[fields["verb"], fields["resource"]] += int(float(number))
    return counts


def _watches(server: envtest.EnvtestServer) -> int:
    counts = re.findall(
        r'^apiserver_longrunning_requests\{.*resource="nodes".*verb="WATCH".*\} (\S+)',
        _scrape(server),
        re.MULTILINE,
    )
    return sum(int(float(number)) for number in counts)


def _cpu_s(server: envtest.EnvtestServer) -> float:
    # The server may be the child of a process that ends it.
    first = server.pid
    children = pathlib.Path(f"/proc/{first}/task/{first}/children").read_text().split()
    ticks = 0
    for pid in (first, *children):
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as reason:
        raise SystemExit(str(reason)) from None
