"""The ends of requests: their times, failed loads, and what they saved."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.times import RequestTimes
from lmcache_sidecar.clients.validation import CallRefusedError, parse_times
from lmcache_sidecar.explain.causes import Blocking, Causes, UncountedRequest
from lmcache_sidecar.explain.open_requests import EndedRequest, OpenRequests
from lmcache_sidecar.explain.requests import ExplainedRequest, RequestEngine
from lmcache_sidecar.explain.sources import find_sources
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Chains
from lmcache_store.tiers.tiered.absences import Absence
from lmcache_store.tiers.tiered.history import ChunkHistory

CHUNK = 256
ENGINE = b"e" * 16
TIMES = RequestTimes("", 0.001, 0.25, 0.5, 1.0)
HISTORY = ChunkHistory(1 << 8)


def keys(text: str) -> list[bytes]:
    return [b"n" * 32 + hashlib.sha256(text[: end + 1].encode()).digest() for end in range(len(text))]


def report(
    causes: Causes, name: str = "r", text: str = "abcd", num_loaded: int = 0, rate: float = 0.0, **fields
) -> None:
    """Report a request of one chunk for each letter, of which ``num_loaded`` chunks are loaded."""
    origins = {keys(text)[int(chunk[1:])]: tier for chunk, tier in fields.items() if chunk[0] == "c"}
    message = pb.Scheduled(
        num_hit_chunks=num_loaded,
        num_loaded_tokens=num_loaded * CHUNK,
        num_prompt_tokens=len(text) * CHUNK + 5,
        reports_times=fields.get("reports_times", True),
        num_blended_tokens=fields.get("num_blended", 0),
    )
    chains = Chains(CHUNK, (KVGroup(0, 16, 4096),), (keys(text),))
    sources = find_sources(chains, message, origins)
    engine = RequestEngine(fields.get("engine", ENGINE), 2, rate)
    blocking = Blocking(Absence.EVICTED)
    causes.note(UncountedRequest(0.0, name, chains, message, sources, HISTORY, blocking, engine=engine))


def end(
    causes: Causes, name: str = "r", num_failed: int = 0, times: RequestTimes = TIMES, blended=(0, 0)
) -> None:
    """``blended``: tokens of documents that were used as they are, and recomputed ones."""
    fields = zip(("num_blended_tokens", "num_recomputed_tokens"), blended, strict=True)
    ended = times._replace(request_id=name, num_failed_tokens=num_failed, **dict(fields))
    causes.note(EndedRequest(ENGINE, ended))
    causes.settle()


@pytest.fixture
def causes():
    HISTORY.__init__(1 << 8)
    return Causes(lambda *_: None)


def test_causes_of_a_load_count_when_it_has_ended(causes):
    report(causes, num_loaded=3)
    causes.settle()
    assert causes.stats.prompt_tokens == 0
    assert causes.requests[-1].tokens == {"memory": 3 * CHUNK, "new": CHUNK, "tail": 5}
    end(causes)
    assert causes.stats.cause_tokens == {"memory": 3 * CHUNK, "new": CHUNK, "tail": 5}


def test_causes_of_a_computed_request_count_at_once(causes):
    report(causes)
    causes.settle()
    assert causes.stats.cause_tokens == {"new": 4 * CHUNK, "tail": 5}
    end(causes)
    assert causes.stats.prompt_tokens == 4 * CHUNK + 5


def test_an_engine_of_an_older_version_reports_no_end(causes):
    report(causes, num_loaded=3, reports_times=False)
    causes.settle()
    assert causes.stats.cause_tokens == {"memory": 3 * CHUNK, "new": CHUNK, "tail": 5}
    assert causes.requests[-1].document()["lookup_seconds"] is None


def test_a_failed_load_is_a_cause_of_its_own(causes):
    report(causes, num_loaded=3, c1="remote")
    end(causes, num_failed=2 * CHUNK)
    assert causes.stats.cause_tokens == {"remote": CHUNK, "load_failed": 2 * CHUNK, "new": CHUNK, "tail": 5}
    report(causes, num_loaded=3)
    end(causes, num_failed=3 * CHUNK)
    assert causes.requests[-1].source == "none"
    assert causes.requests[-1].document()["load_seconds"] == {"memory": 0.5}


@pytest.mark.parametrize(
    ("blended", "num_failed", "tokens"),
    [
        pytest.param((400, 100), 0, {"memory": CHUNK, "blended": 400, "recomputed": 100, "load_failed": 12},
                     id="recomputed tokens and those that failed to load are not hits"),
        pytest.param((512, 0), CHUNK, {"load_failed": CHUNK, "blended": 512}, id="an exact prefix may fail"),
        pytest.param((0, 0), 0, {"memory": CHUNK, "load_failed": 512}, id="a failed blend reuses nothing"),
        pytest.param((0, 512), 0, {"memory": CHUNK, "recomputed": 512}, id="all tokens may be recomputed"),
        pytest.param((9999, 9999), 0, {"memory": CHUNK, "recomputed": 512}, id="never more than was claimed"),
    ],
)  # fmt: skip
def test_the_end_of_a_blend_moves_tokens_that_were_computed(causes, blended, num_failed, tokens):
    report(causes, num_loaded=1, num_blended=512)
    causes.settle()
    assert causes.requests[-1].tokens == {"memory": CHUNK, "blended": 512, "new": CHUNK, "tail": 5}
    end(causes, num_failed=num_failed, blended=blended)
    assert causes.stats.cause_tokens == tokens | {"new": CHUNK, "tail": 5}
    assert causes.requests[-1].document()["load_seconds"] == {"blended": 0.5}


def test_a_blend_saves_at_most_the_time_that_it_did_not_take(causes):
    """Blending takes 0.5 s. Computing the 512 tokens would take 1 s."""
    for blended, seconds in (((512, 0), 0.5), ((400, 112), 0.5), ((200, 312), 200 / 512), ((0, 512), 0.0)):
        causes.benefit.saved_prefill_seconds.clear()
        report(causes, num_blended=512, rate=512.0)
        end(causes, blended=blended)
        assert sum(causes.benefit.saved_prefill_seconds.values()) == seconds
    report(causes, num_blended=100, rate=512.0)
    end(causes, blended=(100, 0))
    report(causes, num_blended=512, rate=512.0)
    causes.end_engine(ENGINE)
    assert not sum(causes.benefit.saved_prefill_seconds.values()), "its end is not known"


def test_blended_prompts_are_compared_with_prompts_without_hits(causes):
    report(causes, num_blended=512)
    end(causes, blended=(400, 112))
    assert causes.benefit.first_tokens == {"2048": {"tier": {"1": 1}}}
    report(causes, num_blended=512)
    end(causes)
    assert causes.benefit.first_tokens == {"2048": {"tier": {"1": 1}}}, "it failed"


def test_loads_of_a_dead_engine_count_as_hits(causes):
    report(causes, "1", num_loaded=1)
    report(causes, "2", num_loaded=1, engine=b"o" * 16)
    causes.end_engine(ENGINE)
    assert causes.stats.prompt_tokens == 4 * CHUNK + 5
    causes.end_engine(b"o" * 16)
    assert causes.stats.prompt_tokens == 2 * (4 * CHUNK + 5)


def test_open_requests_are_bounded_and_none_is_lost(monkeypatch):
    monkeypatch.setattr("lmcache_sidecar.explain.open_requests._MAX_REQUESTS", 10)
    counted: list[ExplainedRequest] = []
    requests = OpenRequests(counted.append)
    for number in range(25):
        requests.add(ExplainedRequest(0.0, str(number), {"memory": 1}, 0, RequestEngine(ENGINE, 1, 0.0)))
    assert [request.request_id for request in counted] == list(map(str, range(15)))
    requests.end_engine(ENGINE)
    assert len(counted) == 25


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["report", "end", "dead"]),
            st.sampled_from(["1", "2", "3"]),
            st.text("ab", max_size=6),
            st.integers(0, 7),
            st.integers(0, 2000),
            st.integers(0, 2000),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_causes_add_up_to_the_prompts_for_any_ends(events):
    causes, expected = Causes(lambda *_: None), 0
    for event, name, text, num_loaded, num_failed, number, reports_times in events:
        if event == "report":
            num_hit, fields = min(num_loaded, len(text)), {"num_blended": number}
            report(causes, name, text, num_hit, reports_times=reports_times, **fields)
            expected += len(text) * CHUNK + 5
        elif event == "end":
            end(causes, name, num_failed, blended=(number, num_failed))
        else:
            causes.end_engine(ENGINE)
        causes.settle()
        assert sum(causes.stats.cause_tokens.values()) == causes.stats.prompt_tokens <= expected
        assert all(number > 0 for number in causes.stats.cause_tokens.values())
    causes.end_engine(ENGINE)
    assert causes.stats.prompt_tokens == expected


def test_saved_prefill_is_the_time_to_compute_the_loaded_tokens(causes):
    report(causes, "1", num_loaded=2, rate=1024.0, c1="disk")
    end(causes, "1")
    assert causes.benefit.saved_prefill_seconds == {"memory": 0.25, "disk": 0.25}
    assert causes.benefit.saved_gpu_seconds == 1.0
    report(causes, "2", num_loaded=2, rate=1024.0)
    end(causes, "2", num_failed=2 * CHUNK)
    assert causes.benefit.saved_gpu_seconds == 1.0, "a failed load saves nothing"


def test_tokens_of_unknown_speed_count_when_the_speed_is_known(causes):
    report(causes, "1", num_loaded=2)
    end(causes, "1")
    assert causes.benefit.unrated_tokens == {"memory": 512}
    assert causes.benefit.saved_prefill_seconds == {}
    report(causes, "2", num_loaded=2, rate=1024.0)
    end(causes, "2")
    assert causes.benefit.saved_prefill_seconds == {"memory": 1.0}
    assert not causes.benefit.unrated_tokens


def test_first_tokens_count_by_length_and_source(causes):
    report(causes, "1", num_loaded=2)
    end(causes, "1")
    report(causes, "2", "x" * 3)
    end(causes, "2", times=RequestTimes("", first_token_seconds=2.0))
    report(causes, "3", "x" * 3)
    end(causes, "3", times=RequestTimes(""))  # it was aborted
    report(causes, "4", num_loaded=2)
    end(causes, "4", num_failed=CHUNK)  # it waited for its load before it computed, and is not comparable
    assert causes.benefit.first_tokens == {"2048": {"tier": {"1": 1}}, "1024": {"none": {"2": 1}}}


def test_bytes_of_tiers_are_integrated_over_time(causes):
    causes.benefit.hold({"memory": 100}, 10.0)
    causes.benefit.hold({"memory": 50, "disk": 1}, 12.0)
    causes.benefit.hold({"memory": 50}, 16.0)
    assert causes.benefit.tier_byte_seconds == {"memory": 400.0, "disk": 4.0}


def test_times_of_a_release_are_parsed():
    tokens = {"num_failed_tokens": 7, "num_blended_tokens": 8, "num_recomputed_tokens": 9}
    taken = pb.RequestTimes(request_id="r", wait_seconds=0.5, **tokens)
    (ended,) = parse_times(pb.ReleaseRequest(times=[taken]), ENGINE)
    assert ended == EndedRequest(ENGINE, RequestTimes("r", 0.0, 0.5, 0.0, 0.0, 7, 8, 9))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"wait_seconds": -1.0}, "finite numbers"),
        ({"load_seconds": float("nan")}, "finite numbers"),
        ({"first_token_seconds": float("inf")}, "finite numbers"),
        ({"request_id": ""}, "request_id must not be empty"),
    ],
)
def test_bad_times_and_those_of_too_many_requests_are_refused(fields, sentence):
    times = pb.RequestTimes(**({"request_id": "r"} | fields))
    with pytest.raises(CallRefusedError, match=sentence):
        parse_times(pb.ReleaseRequest(times=[times]), ENGINE)
    with pytest.raises(CallRefusedError, match="at most 256 requests"):
        parse_times(pb.ReleaseRequest(times=[times] * (service.MAX_TIMES + 1)), ENGINE)
