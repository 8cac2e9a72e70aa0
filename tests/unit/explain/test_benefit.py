"""Savings and costs of the cache, from the statistics of sidecars."""

import math
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.common.prices import GIB, Prices
from lmcache_store.explain import tables
from lmcache_store.explain.benefit import (
    Benefit,
    benefit,
    latency_bucket,
    length_bucket,
    merged,
    quantile,
    saved_latency,
    usd_per_token,
)

HOUR = 3600.0


def stats(first_tokens=None, *, saved=None, unrated=None, **fields) -> dict:
    """Statistics of a sidecar that ran for an hour."""
    part = {
        "saved_prefill_seconds": saved or {},
        "saved_gpu_seconds": 2 * sum((saved or {}).values()),
        "tier_byte_seconds": {"memory": 64 * GIB * HOUR},
        "first_tokens": first_tokens or {},
        "unrated_tokens": unrated or {},
        "lookup_seconds": 0.5,
        "wait_seconds": 1.5,
        "load_seconds": {"memory": 2.0, "remote": 1.0},
    }
    tokens = {"engine": 7, "memory": 1000, "remote": 500, "new": 9}
    return {"uptime_seconds": HOUR, "causes": {"cause_tokens": tokens}, "benefit": part | fields}


def requests(seconds: list[float]) -> dict[str, int]:
    """Requests by the bucket of their time to the first token."""
    numbers: dict[str, int] = {}
    for value in seconds:
        numbers[latency_bucket(value)] = numbers.get(latency_bucket(value), 0) + 1
    return numbers


def text(saved: Benefit) -> str:
    return "\n".join(tables.benefit(saved))


def test_saved_gpu_time_has_the_price_of_the_engines_gpus():
    saved = benefit([stats(saved={"memory": 1800.0, "remote": 900.0})], Prices(gpu_hour=4.0))
    assert ((saved.prefill_seconds, saved.gpu_hours), saved.saved_usd) == ((2700.0, 1.5), 6.0)
    assert saved.loaded_tokens == {"memory": 1000, "remote": 500}, "the engine's own hits do not count"


def test_net_value_subtracts_the_price_of_each_tier():
    prices = Prices(gpu_hour=4.0, memory_gib_hour=0.004, shard_gib_hour=0.01, disk_gib_hour=0.001)
    held = {"memory": 64 * GIB * HOUR, "disk": 100 * GIB * HOUR}
    saved = benefit([stats(saved={"memory": 1800.0}, tier_byte_seconds=held)], prices, shard_bytes=32 * GIB)
    assert saved.gib_hours == pytest.approx({"memory": 64, "disk": 100, "peers": 0, "remote": 32})
    assert saved.spent_usd == pytest.approx({"memory": 0.256, "disk": 0.1, "peers": 0, "remote": 0.32})
    assert saved.net_usd == pytest.approx(4.0 - 0.676)


def test_figures_of_several_sidecars_add_up_and_silent_ones_are_counted():
    counted = stats(saved={"memory": 900.0})
    silent = {"version": "0.3.0", "causes": counted["causes"]}
    saved = benefit([counted, counted, silent], Prices(gpu_hour=1.0))
    assert (saved.num_sidecars, saved.num_silent) == (2, 1)
    assert (saved.gpu_hours, saved.wait_seconds, saved.load_seconds) == (1.0, 3.0, 6.0)
    assert saved.loaded_tokens == {"memory": 2000, "remote": 1000}
    assert "1 of 3 sidecars count no benefit" in text(saved)
    assert text(benefit([{}], Prices())).startswith("1 of 1 sidecars count no benefit")
    assert text(benefit([], Prices())) == ""


def test_saved_latency_compares_requests_of_like_length():
    first_tokens = {
        "1024": {"tier": requests([0.1] * 30), "none": requests([0.5] * 5)},
        "8192": {"tier": requests([1.0] * 10), "none": requests([4.0] * 50)},
        "65536": {"tier": requests([2.0] * 60)},  # nothing to compare with
        "256": {"none": requests([0.01]), "engine": requests([0.01])},
    }
    saved = saved_latency(first_tokens)
    assert saved.num_requests == 40
    assert saved.p50 == pytest.approx((0.4 * 30 + 3.0 * 10) / 40, rel=0.15)


def test_hits_that_took_longer_have_a_negative_saving_and_engine_hits_are_not_compared():
    first_tokens = {"1024": {"tier": requests([1.0]), "engine": requests([9.0])}}
    assert saved_latency(first_tokens) is None
    first_tokens["1024"]["none"] = requests([0.25])
    assert saved_latency(first_tokens).p50 == pytest.approx(-0.75, rel=0.2)


def test_saved_latency_is_not_known_without_like_requests():
    first_tokens = {"1024": {"tier": requests([0.1])}, "2048": {"none": requests([0.1])}}
    assert saved_latency(first_tokens) is None
    saved = benefit([stats(first_tokens)], Prices())
    assert saved.num_hits == 1
    assert "a hit gives the first token is not known, because" in text(saved)


def test_tables_show_savings_costs_and_what_is_not_known():
    first_tokens = {"1024": {"tier": requests([0.1] * 30), "none": requests([0.5] * 5)}}
    shown = text(
        benefit(
            [stats(first_tokens, saved={"memory": 7200.0}, unrated={"memory": 256})],
            Prices(gpu_hour=2.5, memory_gib_hour=0.004),
            shard_bytes=32 * GIB,
        )
    )
    lines = shown.splitlines()
    assert lines[1].split()[-1] == "1,500"
    assert lines[3].split()[-1] == "+10.00"
    assert [line.split()[-1] for line in lines if "tier" in line and "GiB h" in line] == ["-0.26", "-0.13"]
    assert next(line for line in lines if line.startswith("net")).split() == ["net", "+9.62"]
    assert "256 loaded tokens are not priced" in shown
    assert "30 of 30 requests with hits" in " ".join(shown.split())
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("uptime_seconds", "has_gpus", "seconds"),
    [(59.0, True, 99.0), (3600.0, False, 99.0), (3600.0, True, 0.1)],
)
def test_no_money_without_gpus_or_a_minute_of_data_or_a_saving(uptime_seconds, has_gpus, seconds):
    report = stats(saved={"memory": seconds}) | {"uptime_seconds": uptime_seconds}
    shown = "\n".join(tables.benefit(benefit([report], Prices(gpu_hour=2.5)), has_gpus))
    assert "USD" not in shown
    assert "0.00" not in shown
    assert shown.startswith("In total, requests waited")


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [(0, "1"), (1, "1"), (2, "2"), (1024, "1024"), (1025, "2048"), (1 << 40, str(1 << 24))],
)
def test_prompts_are_bounded_by_powers_of_two(num_tokens, bucket):
    assert length_bucket(num_tokens) == bucket


@given(st.floats(1e-4, 500.0))
def test_a_duration_lies_in_its_bucket(seconds):
    assert all(float(latency_bucket(extreme)) > 0 for extreme in (0.0, -1.0, 1e-9, 1e9))
    bound = float(latency_bucket(seconds))
    assert bound * 2**-0.25 * 0.999 <= seconds <= bound * 1.001


latencies = st.lists(st.floats(1e-3, 100.0), min_size=2, max_size=200)


@given(latencies)
def test_quantiles_are_exact_to_one_bucket(seconds):
    exact = quantiles(seconds, n=20, method="inclusive")
    for share, value in ((0.5, exact[9]), (0.95, exact[18])):
        lowest = max((s for s in seconds if s <= value), default=min(seconds))
        highest = min((s for s in seconds if s >= value), default=max(seconds))
        estimate = quantile(requests(seconds), share)
        assert lowest * 2**-0.26 <= estimate <= highest * 2**0.26


sources = st.dictionaries(st.sampled_from(["tier", "engine", "none"]), latencies.map(requests))
first_tokens = st.dictionaries(st.integers(1, 1 << 20).map(length_bucket), sources)


@given(st.lists(first_tokens, max_size=4))
def test_merged_numbers_lose_no_request(parts):
    def total(part) -> int:
        return sum(sum(numbers.values()) for sources in part.values() for numbers in sources.values())

    before = [total(part) for part in parts]
    assert total(merged(parts)) == sum(before)
    assert [total(part) for part in parts] == before, "merging must not change its input"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=3), values, max_size=2),
    max_leaves=4,
)
parts = st.sampled_from(sorted(stats()["benefit"]))


@given(st.dictionaries(parts, json_values), json_values, json_values)
def test_reports_of_wrong_types_count_as_nothing(fields, uptime, causes):
    """Reports come from users' pods."""
    report = stats(**fields) | {"uptime_seconds": uptime, "causes": causes}
    saved = benefit([report, {"benefit": uptime}], Prices())
    assert math.isfinite(saved.net_usd)
    assert text(saved)


def test_price_of_a_token_is_that_of_the_engines_gpus_and_speed():
    """An engine of 2 GPUs at 3.60 USD computes 1,000 tokens a second, and one of 1 GPU computes 500."""
    slow, fast = ({"gpus": gpus, "prefill_tokens_per_second": 500.0 * gpus} for gpus in (1, 2))
    reports = [{"lookups": part, "causes": {"prompt_tokens": 100}} for part in (slow, fast)]
    assert usd_per_token(reports, Prices(gpu_hour=3.6)) == pytest.approx(0.001 / 500)
    reports.append({"lookups": slow | {"prefill_tokens_per_second": 0.0}, "causes": {"prompt_tokens": 900}})
    assert usd_per_token(reports, Prices(gpu_hour=3.6)) == pytest.approx(0.001 / 500), "no speed, no price"
    assert usd_per_token([], Prices()) == 0.0
    reports = [{"lookups": fast | {"computes_on_cpu": True}, "causes": {"prompt_tokens": 100}}]
    assert usd_per_token(reports, Prices()) == 0.0, "CPUs have no price"
