"""The partitioner as a process, its pages, and its pauses."""

import pathlib
import signal
import subprocess
import sys

import pytest

from mig_manager.partitioner import metrics
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.partitioner import partitioner_rig
from tests.rigs import waiting


@pytest.mark.slow
def test_process_acts_and_releases_its_lease_on_a_signal(tmp_path: pathlib.Path) -> None:
    with partitioner_rig.serving(apiserver.ApiServer()) as rig:
        rig.add_node()
        rig.add_pods("p1")
        kubeconfig = str(rig.server.kubeconfig(tmp_path / "kubeconfig"))
        command = (sys.executable, "-m", "mig_manager", "partitioner", "--kubeconfig", kubeconfig)
        options = ("--mode", "act", "--quiet-s", "0.1", "--lease-namespace", "default")
        with subprocess.Popen((*command, *options), stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
            waiting.until(lambda: bool(rig.events("RepartitioningRequested")), "an Event")
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)

        assert process.returncode == 0, log
        assert rig.requested_layout()
        lease = rig.server.get(kinds.LEASES, "mig-manager-partitioner", "default")
        assert lease["spec"]["holderIdentity"] == ""
        assert '"layout_requested"' in log


def test_the_metrics_have_every_result_from_zero_on() -> None:
    fresh = metrics.PartitionerMetrics(contact_age_s=lambda: 1.5)
    lines = fresh.registry.exposition().decode().splitlines()

    for result in metrics.ChangeResult:
        name = f'mig_manager_partitioner_changes_total{{result="{result.value}"}}'
        assert f"{name} 0.0" in lines
    assert "mig_manager_partitioner_api_contact_age_seconds 1.5" in lines
