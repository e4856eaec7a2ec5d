"""What holds for every test."""

import hypothesis

# A slow machine is no bug.
hypothesis.settings.register_profile(
    "patient",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")
