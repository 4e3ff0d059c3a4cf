"""Settings shared by all tests."""

from hypothesis import HealthCheck, settings

# Test machines are shared: how long an example takes says nothing about the code. A run repeats the one before it;
# `pytest --hypothesis-profile hunt` looks for what no run has met yet.
_SHARED_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_SHARED_MACHINE)
settings.register_profile("hunt", derandomize=False, print_blob=True, **_SHARED_MACHINE)
settings.load_profile("repeatable")
