"""The two servers on which the tests of this folder run."""

from collections.abc import Iterator

import pytest

from tests.rigs.cluster import api_servers, envtest


@pytest.fixture(scope="session")
def real_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[api_servers.EnvtestCluster]:
    folder = tmp_path_factory.mktemp("envtest")
    server = envtest.EnvtestServer(envtest.assets(), folder)
    with server.running():
        real = api_servers.EnvtestCluster(server, folder)
        yield real
        real.close()


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.cluster)])
def where(request: pytest.FixtureRequest) -> api_servers.Cluster:
    return _cluster(request)


@pytest.fixture(
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("real", marks=pytest.mark.cluster),
    ]
)
def where_in_depth(request: pytest.FixtureRequest) -> api_servers.Cluster:
    """The same, for what has many variants and takes its time."""
    return _cluster(request)


def _cluster(request: pytest.FixtureRequest) -> api_servers.Cluster:
    if request.param == "embedded":
        return api_servers.EmbeddedCluster()
    real: api_servers.EnvtestCluster = request.getfixturevalue("real_cluster")
    return real
