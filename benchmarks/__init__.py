"""Measurements, as ratios in one run on one machine: ``python -m benchmarks NAME... [--json FILE]``.

Nothing here is asserted in a test: a noisy machine must not fail a build. The figures of record, with the
commands that give them, stand in ``docs/reference/benchmarks.md``.
"""
