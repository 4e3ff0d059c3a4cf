"""Settings of the whole suite."""

from hypothesis import settings

# Machines that run the tests are shared: how long one example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
