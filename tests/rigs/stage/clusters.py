"""An agent in a cluster, beside its API server: what it holds, reports, and is refused."""

import contextlib
import dataclasses
import http
import pathlib
from collections.abc import Callable, Iterator

from mig_manager import reasons
from mig_manager.adapters.kubernetes import api, responses
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import objects
from tests.rigs.cluster import account_rights, api_servers
from tests.rigs.stage import agent_stage

NODE = stages.NODE_NAME
TRAIN = [("train", "nvidia.com/gpu", {"app": "train"})]
"""A pod for ``Stage.run_pods`` that uses a whole GPU."""


@contextlib.contextmanager
def stage(
    where: api_servers.Cluster,
    folder: pathlib.Path,
    *agent_options: str,
    kind: type[agent_stage.AgentStage] = agent_stage.AgentStage,
    spec: str = "1xA100-SXM4-40GB",
    rights: account_rights.Rights = account_rights.SHIPPED,
    style: objects.DeployStyle = objects.DeployStyle.GPU_OPERATOR,
) -> Iterator[agent_stage.AgentStage]:
    """A node of the cluster with the agent on it, who has these rights and no other."""
    with (
        where.admit(folder, rights) as credentials,
        kind(
            spec,
            *agent_options,
            node_options=dataclasses.replace(agent_stage.QUICK, deploy_style=style),
            credentials=credentials,
        ) as started,
    ):
        yield started


def slot_owners(kube: api.KubeApi) -> list[str]:
    return [
        lease["spec"].get("holderIdentity", "") for lease in kube.get(api_servers.LEASES)["items"]
    ]


def event_reasons(running: stages.Stage) -> set[str]:
    """Stop the agent, so that it has published its Events; return what they report."""
    assert running.stop_agent() == 0
    events = running.api.get(api_servers.EVENTS)["items"]
    return {each["reason"] for each in events if each["source"].get("component") == "mig-manager"}


def refusal(act: Callable[[], object]) -> str:
    """Return the words of an admission policy; nothing if it lets the act pass."""
    try:
        act()
    except responses.ApiError as error:
        if error.reason is reasons.Reason.FORBIDDEN and "AdmissionPolicy" in error.explanation:
            return error.explanation
        if error.status != http.HTTPStatus.CONFLICT:
            raise
    return ""
