"""Fixtures that several test folders share live in tests/harness; this only names them."""

pytest_plugins = ["tests.harness.kube"]
