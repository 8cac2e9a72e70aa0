"""Settings for all tests. Fixtures that several test folders share live in tests/harness."""

from hypothesis import settings

pytest_plugins = ["tests.harness.kube", "tests.harness.leaks"]

# How long an example takes is the machine's business: a busy one must not fail a test.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
