"""Benchmarks: ``python -m benchmarks NAME... [--json FILE]``.

Most figures are ratios within one run on one machine. No test asserts a figure, so that a noisy machine does
not fail a build. ``docs/reference/benchmarks.md`` has the published figures and the commands that measure
them.
"""
