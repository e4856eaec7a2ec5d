"""``kubectl mig status --watch``, with the real kubectl."""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator

import pytest

from mig_manager.core.layout import layout_list, layout_parser
from mig_manager.sandbox.apiserver import kinds
from tests.rigs import programs, waiting
from tests.rigs.shell import commandline, plugin_rig
from tests.shell import terminal

_MODULE = "mig_manager.kubectl"


def watch(
    user: plugin_rig.KubectlUser, *names: str
) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
    return commandline.start(["status", "-w", *names], user.environment, module=_MODULE)


@contextlib.contextmanager
def top(user: plugin_rig.KubectlUser, *words: str) -> Iterator[terminal.Session]:
    """Show the view, and quit it after the body."""
    argv = ["top", "--color=never", *words]
    with terminal.open_session(
        argv, columns=100, environ=user.environment, module=_MODULE
    ) as session:
        yield session
        session.type("q")
        assert session.end() == 0


def plan(session: terminal.Session, layout: str, keys: str = "") -> None:
    """Have a layout planned for the selected node; these keys lead to it in the list."""
    session.type("l")
    session.read_until("> all-disabled")
    if keys:
        session.type(keys)
        session.read_until(f"> {layout}")
    session.type("\r")
    session.read_until("y request it")


def requested_layout(user: plugin_rig.KubectlUser) -> str:
    """Return the layout that is requested for the node that lists its layouts."""
    path = r"jsonpath={.metadata.labels.nvidia\.com/mig\.config}"
    return user.kubectl("get", "node", "gpu-8", "-o", path).out


@pytest.mark.parametrize(
    ("words", "pattern", "has_history"),
    [
        pytest.param(
            *(["gpu-1"], r"GPU 0-7[\s\S]*WHAT[\s\S]*started", True),
            id="one node",
            marks=pytest.mark.slow,
        ),
        pytest.param([], r"NODE[\s\S]*gpu-1[\s\S]*gpu-2", False, id="a line each"),
        pytest.param(
            *(["-o", "wide", "gpu-1", "gpu-2"], r"gpu-1[\s\S]*gpu-2", False),
            id="drawn",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_view_shows_the_nodes_until_q(
    five_node_cluster: plugin_rig.KubectlUser, words: list[str], pattern: str, *, has_history: bool
) -> None:
    argv = ["status", "--watch", *words]
    with terminal.open_session(
        argv, columns=120, rows=500, environ=five_node_cluster.environment, module=_MODULE
    ) as session:
        session.read_until(rf"{pattern}[\s\S]*q quits")
        session.type("q")

        assert session.end() == 0
        assert ("WHAT" in session.shown) is has_history


@pytest.fixture
def another_node(five_node_cluster: plugin_rig.KubectlUser) -> Iterator[None]:
    """The node ``gpu-9`` for one test, which may remove it."""
    five_node_cluster.server.store.create(plugin_rig.node("gpu-9"))
    yield
    five_node_cluster.server.store.remove(("nodes", "", "gpu-9"))


@pytest.mark.usefixtures("another_node")
def test_a_pipe_gets_a_line_for_each_change_of_a_node(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    server = five_node_cluster.server
    with watch(five_node_cluster, "gpu-1", "gpu-9") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = (line.split(" ", 1)[1] for line in process.stdout)
        first = [next(lines), next(lines)]
        server.store.remove(("nodes", "", "gpu-9"))
        deleted = {next(lines), next(lines)}
        server.store.create(plugin_rig.node("gpu-9", requested="all-balanced"))
        again = next(lines)
        request = {"metadata": {"labels": {"nvidia.com/mig.config": "other"}}}
        server.merge(kinds.NODES, "gpu-9", request)
        changed = next(lines)

        process.kill()
        assert process.stderr.read() == ""
    assert first[0].startswith("gpu-1, success, Applied, requested all-balanced")
    assert deleted == {"gpu-9 is gone\n", 'nodes "gpu-9" not found\n'}
    assert again.startswith("gpu-9, success, Applied, requested all-balanced")
    assert changed.startswith("gpu-9, waiting, Applied, requested other, applied all-balanced")


@pytest.mark.slow
@pytest.mark.usefixtures("another_node")
def test_a_view_that_cannot_be_refreshed_says_since_when_and_why(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    with watch(five_node_cluster, "gpu-9") as process:
        assert process.stdout is not None
        process.stdout.readline()
        five_node_cluster.server.store.remove(("nodes", "", "gpu-9"))
        lost = process.stdout.readline()

    assert re.search(r' not up to date since \S+Z: nodes "gpu-9" not found$', lost)


@contextlib.contextmanager
def _hanging(user: plugin_rig.KubectlUser, home: pathlib.Path) -> Iterator[terminal.Session]:
    """Show a view whose kubectl does not answer any more."""
    hangs, folder = home / "hangs", home / "bin"
    real = shlex.quote(programs.path_or_skip("kubectl"))
    programs.write_script(
        folder / "kubectl",
        # After a second its parent waits for it: an interrupted Popen does not end its child.
        f'if test -e {hangs}; then sleep 1; : > {hangs}.now; exec sleep 999; fi\nexec {real} "$@"',
    )
    environ = user.environment | {"PATH": f"{folder}{os.pathsep}{user.path}"}
    argv = ["status", "-w", "gpu-1"]
    with terminal.open_session(argv, columns=80, environ=environ, module=_MODULE) as session:
        session.read_until("q quits")
        hangs.touch()
        waiting.until(pathlib.Path(f"{hangs}.now").exists, "a refresh that hangs")
        yield session


@pytest.mark.slow
def test_a_signal_ends_a_view_whose_refresh_hangs(
    five_node_cluster: plugin_rig.KubectlUser, tmp_path: pathlib.Path
) -> None:
    with _hanging(five_node_cluster, tmp_path) as session:
        session.process.send_signal(signal.SIGTERM)

        assert session.end() == -signal.SIGTERM
        assert session.shown.rstrip().endswith("\x1b[?25h\x1b[?1049l")


@pytest.fixture
def listing_node(five_node_cluster: plugin_rig.KubectlUser) -> Iterator[None]:
    """The node ``gpu-8``, whose agent lists its layouts, for one test."""
    gpus = plugin_rig.gpus_with("2xA100-SXM4-40GB", "all-balanced")
    node = plugin_rig.node("gpu-8", gpus=gpus, requested="all-balanced")
    layouts = layout_parser.parse(plugin_rig.CONFIG, source="config.yaml").layouts.values()
    listed = layout_list.to_json(map(layout_list.Entry.of, layouts))
    node["metadata"]["annotations"]["mig-manager.io/layouts"] = listed
    five_node_cluster.server.store.create(node)
    yield
    five_node_cluster.server.store.remove(("nodes", "", "gpu-8"))


@pytest.mark.slow
@pytest.mark.usefixtures("listing_node")
def test_top_requests_a_layout_by_keys_after_its_plan(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    with top(five_node_cluster, "gpu-1", "gpu-8") as session:
        session.read_until(r"> gpu-1[\s\S]*gpu-8 +success +all-balanced[\s\S]*│2g")
        session.type("\x1b[B")
        session.read_until("> gpu-8")
        session.type("\r")
        session.read_until(r"2g.10gb[\s\S]*Esc back")
        plan(session, "all-1g.5gb", "j")
        assert requested_layout(five_node_cluster) == "all-balanced"
        session.type("y")
        session.read_until("Requested all-1g.5gb for gpu-8")
    assert requested_layout(five_node_cluster) == "all-1g.5gb"


@pytest.mark.slow
@pytest.mark.usefixtures("listing_node", "another_node")
def test_top_leaves_a_node_that_changed_and_is_not_selected(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    for name in ("gpu-8", "gpu-9"):
        five_node_cluster.server.merge(
            kinds.NODES, name, {"metadata": {"labels": {"pool": "top"}}}
        )
    with top(five_node_cluster, "-l", "pool=top") as session:
        session.read_until("> gpu-8")
        plan(session, "all-disabled")
        five_node_cluster.server.merge(
            kinds.NODES, "gpu-8", {"metadata": {"labels": {"pool": None}}}
        )
        session.type("y")
        session.read_until(r"> gpu-9[\s\S]*gpu-8 has changed since it was planned")


@pytest.mark.slow
@pytest.mark.usefixtures("listing_node", "another_node")
def test_top_plans_again_if_the_node_has_changed(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    gpus = plugin_rig.gpus_with("2xA100-SXM4-40GB", "all-disabled")
    disabled = plugin_rig.node("gpu-8", gpus=gpus, requested="all-disabled")
    with top(five_node_cluster, "gpu-9", "gpu-8") as session:
        session.read_until("> gpu-8")
        plan(session, "all-1g.5gb", "j")
        five_node_cluster.server.merge(kinds.NODES, "gpu-8", {"metadata": disabled["metadata"]})
        five_node_cluster.server.store.remove(("nodes", "", "gpu-9"))
        session.read_until(r'"gpu-9" not found')  # the screen is refreshed
        session.type("y")
        session.read_until("gpu-8 has changed since it was planned; nothing was requested")
        assert requested_layout(five_node_cluster) == "all-disabled"
        session.type("y")
        session.read_until("Requested all-1g.5gb for gpu-8")


@pytest.mark.slow
@pytest.mark.usefixtures("listing_node")
@pytest.mark.parametrize(
    ("keys", "layout", "outcome"),
    [
        ("jjj", "all-1g.10gb", "Layout all-1g.10gb does not fit gpu-8"),
        ("jj", "all-balanced", "The node requests layout all-balanced already"),
    ],
)
def test_top_says_why_it_requests_nothing(
    five_node_cluster: plugin_rig.KubectlUser, keys: str, layout: str, outcome: str
) -> None:
    with top(five_node_cluster, "gpu-8") as session:
        session.read_until("> gpu-8")
        plan(session, layout, keys)
        session.type("y")
        session.read_until(outcome)
    assert requested_layout(five_node_cluster) == "all-balanced"


def test_top_names_a_node_whose_agent_lists_no_layouts(
    five_node_cluster: plugin_rig.KubectlUser,
) -> None:
    with top(five_node_cluster, "gpu-1") as session:
        session.read_until("> gpu-1")
        session.type("l")
        session.read_until("the agent of gpu-1 lists no layouts")
