"""Dashboard and alerts agree with the metrics that the agent and the partitioner serve."""

import json
import pathlib
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client import parser

from mig_manager import errors, reasons
from mig_manager.adapters.host import web_server
from mig_manager.adapters.nvml import worker_client
from mig_manager.agent.reports import metrics
from mig_manager.core import liveness, model, profile_name
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.planner import planner
from mig_manager.core.records import run_status
from mig_manager.partitioner import metrics as partitioner_metrics
from mig_manager.sandbox.driver import simulated_worker, state_file
from testkit import nvml_faults
from tests.rigs import programs
from tests.rigs.node import agents, fakes, moments, nodes
from tests.rigs.shipped.overlays import kustomize

ROOT = pathlib.Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
TARGET_LABELS = frozenset({"node", "job"})
"""Which the scrape adds; PodMonitor and Prometheus' operator see to them."""
KUBE_STATE_LABELS = frozenset({"deployment"})
"""Of ``kube_deployment_status_replicas_available`` (kube-state-metrics, deployment-metrics.md)."""


class Scrape(NamedTuple):
    """Labels by sample name; types by the name that HELP and TYPE have."""

    labels: Mapping[str, frozenset[str]]
    types: Mapping[str, str]


def fill_metrics(agent_metrics: metrics.AgentMetrics, state: pathlib.Path) -> None:
    """Have an agent succeed, fail and be superseded, and its worker change GPUs."""
    node = nodes.busy_node()
    agent = agents.new_agent(node, telemetry=agent_metrics)
    agent_metrics.attempt_began(1)
    agent.run("no-such-layout", fakes.FakeCancellation(node.clock))
    agent_metrics.retry_scheduled(5.0)
    agent_metrics.outcome_lost(reasons.Reason.API_UNAVAILABLE)
    done = agent.run("all-1g.5gb", fakes.FakeCancellation(node.clock))
    assert done.state is run_status.State.SUCCESS
    node.pods.add("infer", devices=frozenset(node.gpus[0].mig_uuids[:1]))
    agent.run("all-1g.5gb", fakes.FakeCancellation(node.clock))
    with pytest.raises(errors.Superseded):
        agent.run("all-disabled", fakes.FakeCancellation(node.clock, ends_at=1, is_replaced=True))
    state_file.SharedState(state).create("2xA100-SXM4-40GB")
    command = worker_client.worker_command(program=simulated_worker.program(state))
    gpus = worker_client.WorkerGpus(command=command, timeout_s=60.0, telemetry=agent_metrics)
    before = gpus.observe()
    devices = {profile_name.parse("1g.5gb"): 7}
    desired = {gpu.uuid: model.DesiredGpu.of(model.MigMode.ENABLED, devices) for gpu in before}
    gpus.execute(planner.plan(before, desired))
    nvml_faults.SharedState(state).lose_gpu(1)
    nvml_faults.SharedState(state).fail_gpu(0, action=1)
    gpus.observe()
    agent_metrics.xid_reported(before[0].uuid, 79)
    agent_metrics.repair_ended(is_good=True)


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """A scrape over HTTP of an agent to which everything happened."""
    agent_metrics = metrics.AgentMetrics(contact_age_s=lambda: 1.0)
    fill_metrics(agent_metrics, tmp_path_factory.mktemp("scrape") / "gpus.json")
    checks = liveness.Health(
        liveness.Pulse(time.monotonic),
        stuck_after_s=1.0,
        contact_age_s=lambda: 1.0,
        is_recovered=lambda: True,
    )
    with (
        web_server.served(checks, agent_metrics.exposition, address="127.0.0.1", port=0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer,
    ):
        text = answer.read().decode()
    partitioner = partitioner_metrics.PartitionerMetrics(contact_age_s=lambda: 1.0)
    partitioner.set_pending(decisions.PartitioningDecision(), withheld=0)
    text += partitioner.registry.exposition().decode()
    families = list(parser.text_string_to_metric_families(text))
    return Scrape(
        labels={
            sample.name: frozenset(sample.labels) for each in families for sample in each.samples
        },
        types={
            f"{each.name}_total" if each.type == "counter" else each.name: each.type
            for each in families
        },
    )


def family(sample: str) -> str:
    return re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", sample)


def test_an_idle_agent_exposes_less_than_150_lines() -> None:
    agent_metrics = metrics.AgentMetrics(contact_age_s=lambda: 1.0)

    assert 0 < len(agent_metrics.exposition().splitlines()) < 150


@pytest.mark.slow
def test_every_metric_has_a_series_at_an_agents_end(scrape: Scrape) -> None:
    assert {family(name) for name in scrape.labels} == set(scrape.types)


def test_phases_fill_a_run_and_only_published_states_count() -> None:
    node, telemetry = nodes.busy_node(), fakes.FakeTelemetry()
    agent = agents.new_agent(node, telemetry=telemetry)
    lost = errors.ClusterError("down", reason=reasons.Reason.API_UNAVAILABLE)
    node.failures.add(moments.Call, lost)
    with pytest.raises(errors.ClusterError):
        agent.run("no-such-layout", fakes.FakeCancellation(node.clock))
    events = telemetry.events
    assert (events["state_published"], events["run_ended"]) == ([], [])
    node.failures.clear()
    events.clear()

    agent.run("all-1g.5gb", fakes.FakeCancellation(node.clock))

    phases = [(phase.value, seconds) for phase, seconds in events["phase_ended"]]
    assert [*dict(phases)][:4] == ["Resolve", "Drain", "Pause", "Execute"]
    assert sum(seconds for name, seconds in phases if name == "Drain") > 0
    ((*_, run_s),) = events["run_ended"]
    assert run_s == pytest.approx(sum(seconds for _, seconds in phases))
    *states, last = (state.value for (state,) in events["state_published"])
    assert ({*states}, last) == ({"pending"}, "success")
    assert [name for name, _ in events["layout_applied"]] == ["all-1g.5gb"]


# -- dashboard and alerts ---------------------------------------------------------------------


DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))


def manifest(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((MONITORING / name).read_text("utf-8"))
    return document


ALERTS: list[dict[str, Any]] = [
    rule for group in manifest("alerts.yaml")["spec"]["groups"] for rule in group["rules"]
]


def shown() -> Iterator[tuple[str, str, str]]:
    """Yield where each expression stands, the expression, and the text that shows its labels."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target.get("legendFormat", "")
    for rule in ALERTS:
        yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


EXPRESSIONS = [pytest.param(*each[1:], id=each[0]) for each in shown()]


def test_promtool_accepts_rules_expressions_and_metrics(tmp_path: pathlib.Path) -> None:
    promtool = programs.path_or_skip("promtool")
    panels = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression, _) in enumerate(shown())
    ]
    rules: dict[str, Any] = {"alerts": manifest("alerts.yaml")["spec"]}
    rules["panels"] = {"groups": [{"name": "panels", "rules": panels}]}
    for name, groups in rules.items():
        (tmp_path / name).write_text(json.dumps(groups))
        checked = programs.output(promtool, "check", "rules", "--lint=all", tmp_path / name)
        assert "SUCCESS" in checked
    for kind in (metrics.AgentMetrics, partitioner_metrics.PartitionerMetrics):
        exposition = kind(contact_age_s=lambda: 1.0).registry.exposition().decode()
        linted = programs.run(promtool, "check", "metrics", stdin=exposition)
        assert (linted.returncode, linted.stderr) == (0, "")


@pytest.mark.parametrize(("expression", "text"), EXPRESSIONS)
def test_an_expression_has_metrics_labels_and_values_that_exist(
    scrape: Scrape, expression: str, text: str
) -> None:
    kinds = {"state": run_status.State, "reason": reasons.Reason}
    values = {label: {each.value for each in kind} for label, kind in kinds.items()}
    used = re.findall(r"\b(?:mig_manager_\w+|up)\b", expression)
    existing = (TARGET_LABELS | KUBE_STATE_LABELS).union(
        *(scrape.labels[name] for name in used if name != "up")
    )
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression))))

    assert used
    assert grouped <= existing
    assert set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text)) <= grouped
    for label, selected in re.findall(r"(\w+)(?:=~|!=|=)\"([^\"]*)\"", expression):
        assert label in existing
        if label in values:
            assert set(selected.split("|")) <= values[label]


def test_the_dashboard_shows_every_metric(scrape: Scrape) -> None:
    targets = (each for panel in DASHBOARD["panels"] for each in panel.get("targets", ()))
    used = re.findall(r"\bmig_manager_\w+", " ".join(each["expr"] for each in targets))

    assert set(scrape.types) == {family(name) for name in used}


def test_panels_have_an_id_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_alert_has_a_severity_a_summary_and_a_page_of_remedies() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("warning", "critical")
        is_of_node = "partitioner" not in rule["expr"]
        assert ("{{ $labels.node }}" in rule["annotations"]["summary"]) is is_of_node
        assert "docs/reasons.md" in rule["annotations"]["description"]


LEADER, AGE = "mig_manager_partitioner_leader", "mig_manager_partitioner_api_contact_age_seconds"
UP = 'up{job="mig-manager/mig-manager-partitioner"}'
AVAILABLE = "kube_deployment_status_replicas_available"
PODS = AVAILABLE + '{deployment="mig-manager-partitioner"}'
FAILURES = 'mig_manager_gpu_repairs_total{node="n",result="failure"}'


OBSERVED = (
    'mig_manager_gpu_operation_duration_seconds_count{{node="n",operation="observe",result="{}"}}'
)
OUTCOME = 'mig_manager_last_outcome_info{{node="n",state="failed",reason="{}"}}'


@pytest.mark.parametrize(
    ("series", "fired"),
    [
        ({OUTCOME.format("Drifted"): "1x20"}, None),
        (
            {OUTCOME.format("InUse"): "1x11 stale", OUTCOME.format("Locked"): "_x12 1x9"},
            "MigManagerFailed",
        ),
        (
            {OBSERVED.format("error"): "1+1x20", OBSERVED.format("ok"): "1x20"},
            "MigManagerNoGpuObserved",
        ),
        ({OBSERVED.format("error"): "1+1x20", OBSERVED.format("ok"): "1x10 2x10"}, None),
        ({FAILURES: "0x20"}, None),
        ({FAILURES: "0x10 1x10"}, "MigManagerGpuRepairFailed"),
        ({"mig_manager_partitioner_stopped": "0x20"}, None),
        ({"mig_manager_partitioner_stopped": "1x20"}, "MigManagerPartitionerStopped"),
        ({UP: "1x20", f'{LEADER}{{pod="a"}}': "1x20", f'{LEADER}{{pod="b"}}': "0x20"}, None),
        ({UP: "0x20"}, "MigManagerPartitionerDown"),
        ({UP: "1x20", LEADER: "0x20"}, "MigManagerPartitionerDown"),
        ({UP: "1x20", LEADER: "1x20", AGE: "0+60x20", PODS: "1x20"}, None),
        ({AVAILABLE + '{deployment="another"}': "0x20"}, None),
        ({PODS: "0x20"}, "MigManagerPartitionerDown"),
        ({UP: "1x20", LEADER: "1x20", AGE: "700+60x20"}, "MigManagerPartitionerDown"),
    ],
)
def test_an_alert_fires_for_its_series_alone(
    tmp_path: pathlib.Path, series: Mapping[str, str], fired: str | None
) -> None:
    names = {
        rule["alert"]: rule
        for rule in ALERTS
        if re.search("Partitioner|Repair|Failed$|NoGpu", rule["alert"])
    }
    (tmp_path / "rules.yaml").write_text(json.dumps(manifest("alerts.yaml")["spec"]), "utf-8")
    labels = {"node": "n"} if 'node="n"' in next(iter(series)) else {}
    played = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": "20m",
                "alertname": name,
                "exp_alerts": [
                    {
                        "exp_labels": labels | rule["labels"],
                        "exp_annotations": {
                            key: text.replace("{{ $labels.node }}", "n")
                            for key, text in rule["annotations"].items()
                        },
                    }
                ]
                if name == fired
                else [],
            }
            for name, rule in names.items()
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": ["rules.yaml"], "tests": [played]}), "utf-8")

    programs.output(programs.path_or_skip("promtool"), "test", "rules", file)


def test_the_partitioner_has_a_monitor_of_its_own() -> None:
    spec = manifest("podmonitor-partitioner.yaml")["spec"]
    documents = yaml.safe_load_all((MONITORING / "../partitioner/partitioner.yaml").read_text())
    (template,) = (each["spec"]["template"] for each in documents if each["kind"] == "Deployment")
    (container,) = template["spec"]["containers"]

    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert [each["port"] for each in spec["podMetricsEndpoints"]] == [
        port["name"] for port in container["ports"]
    ]


def test_monitor_and_probes_use_the_port_of_the_daemon_set() -> None:
    monitor, daemons = manifest("podmonitor.yaml"), manifest("../base/daemonset.yaml")
    template = daemons["spec"]["template"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    environ = {each["name"]: each.get("value") for each in container["env"]}
    job = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    health, ready = ({"path": path, "port": port["name"]} for path in ("/healthz", "/readyz"))

    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= template["metadata"]["labels"].items()
    assert monitor["metadata"]["namespace"] == daemons["metadata"]["namespace"]
    assert endpoint["port"] == port["name"]
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["node"]
    assert any(f'up{{job="{job}"}}' in rule["expr"] for rule in ALERTS)
    assert environ["MIG_MANAGER_HEALTH_PORT"] == str(port["containerPort"])
    assert container["startupProbe"]["httpGet"] == container["livenessProbe"]["httpGet"] == health
    assert container["readinessProbe"]["httpGet"] == ready


def test_one_command_applies_the_monitor_the_rules_and_the_dashboard() -> None:
    rendered = kustomize("deploy/monitoring")
    by_kind = {each["kind"]: each for each in yaml.safe_load_all(rendered)}

    assert set(by_kind) == {"ConfigMap", "PodMonitor", "PrometheusRule"}
    assert {each["metadata"]["namespace"] for each in by_kind.values()} == {"mig-manager"}
    assert json.loads(by_kind["ConfigMap"]["data"]["dashboard.json"]) == DASHBOARD
