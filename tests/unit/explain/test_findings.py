"""Findings about the causes, and their table on a terminal."""

import re

import pytest
import yaml

from lmcache_store.causes import CAUSES, COMPUTED, HITS
from lmcache_store.explain import tables
from lmcache_store.explain.findings import findings
from testing.child_process import REPOSITORY

CRD = REPOSITORY / "crds" / "lmcacheclusters.lmcache.io.yaml"


def causes(diverged: dict[str, int] | None = None, **tokens: int) -> dict:
    diverged = diverged or {}
    tokens |= {"diverged": sum(diverged.values())} if diverged else {}
    return {"prompt_tokens": sum(tokens.values()), "cause_tokens": tokens, "diverged_tokens": diverged}


def text(counted: dict) -> str:
    return "\n".join(tables.overview(counted))


def test_timestamps_at_the_front_are_the_first_finding():
    first, second = findings(causes({"64": 700, "4096": 100}, memory=100, evicted=100))
    assert first.statement == "78 % of computed tokens follow a divergence within the first 64 tokens."
    assert "Move it to the end" in first.advice
    assert second.statement.startswith("10 % of all prompt tokens were stored before")


def test_divergence_after_a_long_document_is_no_fault():
    (finding,) = findings(causes({"256": 100, "8192": 900}, memory=1000))
    assert finding.statement == "100 % of computed tokens follow a divergence within the first 8,192 tokens."
    assert "Nothing is wrong" in finding.advice
    assert not findings(causes({"more": 900}, memory=100)), "a very deep divergence is not mentioned"


@pytest.mark.parametrize("cause", sorted(COMPUTED.keys() - {"new", "diverged"}))
def test_each_large_cause_has_advice_and_a_small_one_has_none(cause):
    (finding,) = findings(causes(memory=500, **{cause: 500}))
    assert finding.share == 0.5
    assert finding.advice.endswith(".")
    assert not findings(causes(memory=960, **{cause: 40}))


def test_advice_names_fields_that_exist():
    (version,) = yaml.load(CRD.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    advice = " ".join(
        findings(causes(**{cause: 500}))[0].advice for cause in COMPUTED.keys() - {"new", "diverged"}
    )
    paths = re.findall(r"spec(?:\.\w+)+", advice)
    assert paths
    for path in paths:
        schema = version["schema"]["openAPIV3Schema"]
        for name in path.split("."):
            schema = schema["properties"][name]


def test_new_tokens_and_hits_need_no_advice():
    assert not findings(causes(new=900, memory=100))
    assert "Nothing stands out." in text(causes(new=900, memory=100))


def test_findings_have_the_price_of_computing_their_tokens():
    counted = causes({"64": 700}, memory=300, evicted=1000)
    first, second = findings(counted, usd_per_token=0.01)
    assert (first.usd, second.usd) == (10.0, 7.0)
    assert "took 10.00 USD of GPU time." in " ".join(" ".join(tables.overview(counted, 0.01)).split())
    assert "USD" not in "\n".join(tables.overview(counted))


def test_no_prompt_is_said_so():
    assert text(causes()) == "No prompt was counted yet: send a request to the engine."
    assert not findings(causes())


def test_overview_shows_every_cause_with_its_share():
    shown = text(causes({"64": 10}, **dict.fromkeys([c for c in CAUSES if c != "diverged"], 10)))
    shares = "24 % loaded, 5 % in the engine's own cache, 71 % computed."
    assert shown.startswith(f"210 tokens of prompts: {shares}")
    for title in (*HITS.values(), *COMPUTED.values()):
        assert title in shown
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_request_shows_only_its_own_causes_and_how_long_it_took():
    explained = {"request_id": "cmpl-1", "tokens": {"remote": 2000, "tail": 5}, "common_tokens": 2000}
    shown = "\n".join(tables.request(explained))
    assert shown.startswith("Request cmpl-1: 2,005 tokens.")
    assert "remote tier" in shown
    assert "memory tier" not in shown
    assert "Its engine has not reported how long it took." in shown
    explained |= {"lookup_seconds": 0.0004, "wait_seconds": 0.2, "load_seconds": {"remote": 0.0123}}
    times = "Time: lookup 0.4ms, wait 200ms, load from remote tier 12.3ms"
    with_first_token = tables.request(explained | {"first_token_seconds": 1.5})
    assert f"{times}, arrival to first token 1.5s." in with_first_token
    assert f"{times}." in tables.request(explained | {"first_token_seconds": None})
    wrong = {"lookup_seconds": "x", "wait_seconds": [], "load_seconds": 3, "first_token_seconds": "y"}
    assert "Time: lookup 0s, wait 0s." in tables.request(explained | wrong)
