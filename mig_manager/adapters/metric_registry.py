"""The metrics that a program serves to Prometheus, in its client library."""

import functools
from collections.abc import Callable, Mapping

import prometheus_client

import mig_manager

Gauge = prometheus_client.Gauge


class MetricRegistry(prometheus_client.CollectorRegistry):
    """The metrics of one program: first its version, and the age of its contact with the API.

    ``gauge``, ``counter`` and ``histogram`` add a metric; its name gets the namespace as a prefix.
    """

    def __init__(
        self, namespace: str, *, program: str, contact_age_s: Callable[[], float]
    ) -> None:
        super().__init__()
        # A creation time for every counter would double the number of series.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.gauge = functools.partial(Gauge, namespace=namespace, registry=self)
        self.counter = functools.partial(
            prometheus_client.Counter, namespace=namespace, registry=self
        )
        self.histogram = functools.partial(
            prometheus_client.Histogram, namespace=namespace, registry=self
        )
        age = self.gauge(
            "api_contact_age_seconds", "Time since the Kubernetes API last sent any data."
        )
        age.set_function(contact_age_s)
        build = self.gauge("build_info", f"The version of the {program}; always 1.", ("version",))
        build.labels(version=mig_manager.__version__).set(1)

    def exposition(self) -> bytes:
        """Return all metrics in the text format 0.0.4."""
        return prometheus_client.generate_latest(self)


def replace(gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
    """Set these series of a gauge and remove all others."""
    gauge.clear()
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
