"""The trace simulator, and the accuracy of its estimate on both traces."""

import statistics
from pathlib import Path

import pytest

from lmcache_store.tiers.policy import LRU
from tools.simulate import (
    NoEviction,
    Request,
    TraceError,
    estimate,
    main,
    read_trace,
    simulate,
    stack_distances,
    tail_first,
)

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"
BLOCK = 64 << 20


@pytest.mark.parametrize(
    ("prompts", "num_rows", "policy", "ratio"),
    [
        pytest.param([(1, 2, 3), (1, 2, 4), (9, 2, 3)], 10, LRU, 2 / 9, id="up to the first missing block"),
        pytest.param([(1, 2, 3), (1, 2, 3)], 2, LRU, 2 / 6, id="tails are evicted before heads"),
        pytest.param([(1, 2), (3, 4), (1, 2, 3)], 2, NoEviction, 2 / 7, id="the first blocks are kept"),
    ],
)
def test_hit_ratio_of_a_trace(prompts, num_rows, policy, ratio):
    requests = [Request(time, blocks) for time, blocks in enumerate(prompts)]
    assert simulate(requests, num_rows, policy(num_rows)) == ratio


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_estimate_is_within_half_a_percentage_point_on_average(name):
    requests = list(read_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz"))
    distances = sorted(stack_distances(tail_first(requests)))
    curve = estimate(requests, BLOCK)
    assert curve.num_keys <= 16_000 + 64
    num_blocks = len({block for request in requests for block in request.blocks})
    errors = []
    for percent in range(1, 101):
        num_rows = num_blocks * percent // 100
        exact = sum(0 < distance <= num_rows for distance in distances) / len(distances)
        errors.append(abs(curve.hit_ratio(num_rows * BLOCK).hit_ratio - exact))
    assert statistics.mean(errors) <= 0.005


def test_policy_of_the_tiers_is_as_good_as_lru():
    requests = list(read_trace(TRACES / "mooncake_synthetic_trace.jsonl.gz"))
    distances = stack_distances(tail_first(requests))
    exact = sum(0 < distance <= 8000 for distance in distances) / len(distances)
    assert simulate(requests, 8000, LRU(8000)) == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"timestamp": 0}', '{"timestamp": 0, "hash_ids": ["x"]}', "null"]
)
def test_error_names_the_invalid_line(tmp_path, line, capsys):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match="line 2"):
        list(read_trace(trace))
    for path, message in ((trace, "line 2"), (tmp_path / "missing.jsonl", "missing.jsonl")):
        assert main([str(path)]) == 1
        assert message in capsys.readouterr().err


def test_command_prints_a_line_per_size_and_draws_a_plot(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n' * 4)
    assert (
        main([str(trace), "--sizes", "64Mi,1Gi", "--policy", "lru", "--plot", str(tmp_path / "c.png")]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["size", "64Mi", "1Gi"]
    assert lines[2].split()[1] == "75.00"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
