"""The two servers on which the tests of this folder run."""

from collections.abc import Iterator

import pytest

from tests.rigs.cluster import envtest
from tests.rigs.stage import clusters


@pytest.fixture(scope="session")
def real_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.EnvtestCluster]:
    folder = tmp_path_factory.mktemp("envtest")
    server = envtest.EnvtestServer(envtest.assets(), folder)
    with server.running():
        real = clusters.EnvtestCluster(server, folder)
        yield real
        real.close()


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.cluster)])
def where(request: pytest.FixtureRequest) -> clusters.Cluster:
    return _cluster(request)


@pytest.fixture(
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("real", marks=pytest.mark.cluster),
    ]
)
def where_in_depth(request: pytest.FixtureRequest) -> clusters.Cluster:
    """The same, for what has many variants and takes its time."""
    return _cluster(request)


def _cluster(request: pytest.FixtureRequest) -> clusters.Cluster:
    if request.param == "embedded":
        return clusters.EmbeddedCluster()
    real: clusters.EnvtestCluster = request.getfixturevalue("real_cluster")
    return real
