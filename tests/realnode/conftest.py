"""One real cluster at a time for the stories; a failure leaves what explains it."""

import contextlib
import pathlib
import re
import shutil
from collections.abc import Generator, Iterator

import pytest

from tests.realnode import gpu_operator, manifests, namespaces, nvidia_manager, real_cluster
from tests.rigs import waiting

_BUNDLES = pathlib.Path(__file__).parents[2] / "realnode-bundles"
_LAYOUTS = """
  one-slice:
  - devices: [0]
    mig-enabled: true
    mig-devices: {1g.5gb: 5, 2g.10gb: 1}
  - devices: [1]
    mig-enabled: true
    mig-devices: {1g.5gb: 7}
  too-much:
  - devices: all
    mig-enabled: true
    mig-devices: {3g.20gb: 3}
"""
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note which stories failed."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


class Clusters:
    """The cluster that runs now; another shape ends it, and so does a story that spoils it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._running = contextlib.ExitStack()
        self._current: real_cluster.RealCluster | None = None
        self.is_spoiled = False
        """Whether the story under way leaves a cluster that no other can take."""

    def of(self, shape: real_cluster.ClusterShape) -> real_cluster.RealCluster:
        """Return a running cluster of a shape, without a requested layout."""
        if self._current is not None and self._current.shape != shape:
            self.end()
        if self._current is not None:
            try:
                self._current.reset()
            except BaseException:
                self._current.save(_BUNDLES / "reset")
                self.end()
                raise
        else:
            folder = self._factory.mktemp("realnode")
            # A node's disk has hundreds of megabytes, and pytest keeps folders of earlier runs.
            self._running.callback(shutil.rmtree, folder)
            cluster = real_cluster.RealCluster(folder, real_cluster.CACHE, shape)
            try:
                self._running.enter_context(cluster.up())
                cluster.install_agent()
            except BaseException:
                cluster.save(_BUNDLES / "start")
                self._running.close()
                raise
            self._current = cluster
        return self._current

    def end(self) -> None:
        """End the cluster, if one runs."""
        self._current, self.is_spoiled = None, False
        self._running.close()


@pytest.fixture(scope="session")
def clusters(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Clusters]:
    missing = namespaces.missing()
    if missing:
        pytest.skip(missing)
    modules = {item.path.stem for item in request.session.items}
    if "test_nvidia_manager" in modules:
        nvidia_manager.prepare()
    if "test_operator" in modules:
        gpu_operator.prepare()
    before = namespaces.of_the_machine()
    every = Clusters(tmp_path_factory)
    try:
        yield every
    finally:
        every.end()
    # Other programs of the machine may mount or write something for a moment.
    with contextlib.suppress(AssertionError):
        waiting.until(
            lambda: namespaces.of_the_machine() == before, "the end of the namespaces", within_s=20
        )
    assert namespaces.of_the_machine() ^ before == set()


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    """The cluster that the stories of a module take; a module may have another.

    By default it is one node with layouts and settings of its owner.
    """
    settings = manifests.settings(
        MIG_MANAGER_PLUGIN_TIMEOUT_S="30",
        MIG_MANAGER_PLUGIN_CONFIGS="all-1g.10gb=shared,all-4g.20gb=whole",
    )
    return real_cluster.ClusterShape(patches=(manifests.layouts(_LAYOUTS), settings))


@pytest.fixture
def cluster(
    clusters: Clusters, shape: real_cluster.ClusterShape, request: pytest.FixtureRequest
) -> Iterator[real_cluster.RealCluster]:
    """A cluster at rest; the story after one that failed gets a new one."""
    current = clusters.of(shape)
    yield current
    is_failed = request.node.stash.get(_FAILED, False)
    if is_failed:
        current.save(_BUNDLES / re.sub(r"\W+", "-", request.node.name))
    if is_failed or clusters.is_spoiled:
        clusters.end()


@pytest.fixture
def expendable_cluster(
    clusters: Clusters, cluster: real_cluster.RealCluster
) -> real_cluster.RealCluster:
    """A cluster that no other story gets after this one."""
    clusters.is_spoiled = True
    return cluster
