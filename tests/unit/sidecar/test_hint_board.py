"""Decisions of a sidecar about hints, on a tiered store of 16 rows. Hints may retain four of them."""

import pytest

from lmcache_sidecar import hints as board_module
from lmcache_sidecar.hints import HintBoard, HintedPrompt
from lmcache_store.hints import HintAction, HintDecision, HintKind, HintOutcome
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.budgets import Budget, Budgets
from lmcache_store.tiers.memory.contracts import Chains
from tests.harness.tiers.chains import CHUNK_TOKENS, one_chain
from tests.harness.tiers.tiered_world import NAMESPACE, SIZE, World, chain, run, until

ACCEPTED, CLIPPED, REFUSED = HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.REFUSED
MAX_TTL_SECONDS = 100.0


@pytest.fixture
def board():
    return HintBoard(MAX_TTL_SECONDS)


def prompt(keys: list[bytes], request_id: str = "request") -> HintedPrompt:
    return HintedPrompt(request_id, "message", b"e" * 16, one_chain(keys, SIZE), NAMESPACE)


def retain(**fields) -> HintAction:
    return HintAction("retain", HintKind.RETAIN, **({"ttl_seconds": 50.0} | fields))


async def decide(board: HintBoard, world: World, action: HintAction, keys: list[bytes]) -> HintDecision:
    (decision,) = await board.apply([action], prompt(keys), world.store)
    return decision


def held(world: World, keys: list[bytes]) -> int:
    """Number of rows that hints retain."""
    return sum(world.store.memory.hints.holds.of(key) is not None for key in keys)


def accepted(num_chunks: int, seconds: float = 0.0, action_id: str = "retain") -> HintDecision:
    return HintDecision(action_id, ACCEPTED, "", num_chunks * CHUNK_TOKENS, seconds)


@run
async def test_retained_rows_outlive_others(world):
    board = HintBoard(MAX_TTL_SECONDS)
    await world.write(chain(3))
    assert await decide(board, world, retain(), chain(3)) == accepted(3, 50.0)
    for start in range(100, 116, 4):
        await world.write(chain(4, start=start))
    assert all(map(world.store.memory.is_resident, chain(3)))
    (retained,) = board.retained()
    assert retained[:7] == ("default", "message", "retain", "request", 3, 3 * 2 * SIZE, 3 * CHUNK_TOKENS)
    assert retained.seconds_left == pytest.approx(50.0)
    world.lookup(chain(3))
    assert board.retained()[0].saved_tokens == board.stats.saved_tokens == 3 * CHUNK_TOKENS
    world.now = 50.0
    assert board.retained() == []
    assert (board.stats.saved_tokens, board.stats.unused) == (3 * CHUNK_TOKENS, 0)
    assert board.stats.actions == {"retain accepted": 1}


@run
async def test_bounds_clip_and_are_named(world):
    board = HintBoard(MAX_TTL_SECONDS)
    clipped = HintDecision("retain", CLIPPED, "bounded by retainPercent", 4 * CHUNK_TOKENS, 50.0)
    assert await decide(board, world, retain(), chain(6)) == clipped
    assert held(world, chain(6)) == 4
    long = await decide(board, world, retain(ttl_seconds=1e12, end_token=2 * CHUNK_TOKENS + 5), chain(6))
    assert long == HintDecision(
        "retain", CLIPPED, "bounded by maxTtlSeconds", 2 * CHUNK_TOKENS, MAX_TTL_SECONDS
    )


@run
async def test_hints_of_lower_priority_get_what_others_leave(world):
    board = HintBoard(MAX_TTL_SECONDS)
    for start in (0, 20, 40, 60):  # hints name rows of the whole share, which an LRU may have anyway
        above = await decide(
            board, world, retain(priority=1), chain(4, start=start)[: 3 if start == 60 else 4]
        )
        assert above.outcome is ACCEPTED
    low = retain(ttl_seconds=1.0)
    bound = "what other hints of the tenant retain"
    clipped = HintDecision("retain", CLIPPED, f"bounded by {bound}", CHUNK_TOKENS, 1.0)
    assert await decide(board, world, low, chain(6, start=100)) == clipped
    refused = HintDecision("retain", REFUSED, f"nothing is left by {bound}")
    assert await decide(board, world, low._replace(priority=-1), chain(6, start=200)) == refused


@run
async def test_prompts_without_a_whole_chunk_are_refused(world):
    board = HintBoard(MAX_TTL_SECONDS)
    short = HintAction("a", HintKind.PREFETCH, end_token=CHUNK_TOKENS - 1)
    for action, keys, reason in (
        (retain(), [], "the prompt has no whole chunk of tokens that is cached"),
        (retain(end_token=255), chain(2), "a chunk has 256 tokens: retain at least one"),
        (short, chain(2), "a chunk has 256 tokens: prefetch at least one"),
        (
            HintAction("a", HintKind.RELEASE, 10, 500),
            chain(2),
            "these tokens have no whole chunk of 256 tokens",
        ),
    ):
        decision = await decide(board, world, action, keys)
        assert (decision.outcome, decision.reason) == (REFUSED, reason)
    assert held(world, chain(2)) == 0


@run
async def test_tenant_without_a_budget_for_hints_is_refused(world):
    board = HintBoard(MAX_TTL_SECONDS)
    world.store.memory.set_budgets(Budgets(no_salt=Budget(retain_percent=0)))
    assert (await decide(board, world, retain(), chain(1))).reason == "nothing is left by retainPercent"


@run
async def test_rows_of_the_answer_are_retained_with_the_prompt(world):
    board = HintBoard(MAX_TTL_SECONDS)
    await decide(board, world, retain(), chain(1))
    await world.write(chain(2, start=7), request="request")
    assert held(world, [*chain(1), *chain(2, start=7)]) == 3


@run
async def test_rows_of_the_answer_are_not_retained_if_a_prefix_is(world):
    board = HintBoard(MAX_TTL_SECONDS)
    await decide(board, world, retain(end_token=CHUNK_TOKENS), chain(1))
    await world.write(chain(2, start=7), request="request")
    assert held(world, [*chain(1), *chain(2, start=7)]) == 1


@run
async def test_release_undoes_retain(world):
    board = HintBoard(MAX_TTL_SECONDS)
    await world.write(chain(16))
    await decide(board, world, retain(), chain(3))
    release = HintAction("release", HintKind.RELEASE, begin_token=CHUNK_TOKENS)
    assert await decide(board, world, release, chain(3)) == accepted(2, action_id="release")
    assert held(world, chain(3)) == 1
    await world.write(chain(2, start=100))
    assert [world.store.memory.is_resident(key) for key in chain(16)] == [True, False, False, *[True] * 13]


@run
async def test_prefetch_promotes_what_lower_tiers_have(world):
    board = HintBoard(MAX_TTL_SECONDS)
    world.remote.fill(chain(12))
    action = HintAction("p", HintKind.PREFETCH, end_token=10 * CHUNK_TOKENS)
    assert await decide(board, world, action, chain(14)) == accepted(10, action_id="p")
    await until(lambda: all(map(world.store.memory.is_resident, chain(10))))
    await until(lambda: not board._prefetches)
    assert not world.store.memory.is_resident(chain(12)[11])
    assert world.store.memory.stats.misses == world.store.memory.stats.hits == 0


@run
async def test_number_of_prefetches_is_bounded(world):
    board = HintBoard(MAX_TTL_SECONDS)
    world.remote.hold("probe")
    action = HintAction("p", HintKind.PREFETCH)
    max_running = board_module._MAX_TENANT_PREFETCHES
    decisions = [await decide(board, world, action, chain(1, start=100 * n)) for n in range(max_running + 1)]
    assert [decision.outcome for decision in decisions] == [ACCEPTED] * max_running + [REFUSED]
    assert decisions[-1].reason == "too many prefetches are running: send this one again later"
    world.remote.open.set()
    await until(lambda: not board._prefetches)


@run
async def test_private_rows_can_only_be_prefetched_from_memory(world):
    board = HintBoard(MAX_TTL_SECONDS)
    private = prompt(chain(1))._replace(namespace=b"p" * 32)
    (decision,) = await board.apply([HintAction("p", HintKind.PREFETCH)], private, world.store)
    assert decision == HintDecision("p", REFUSED, "no other tier can have more of this prompt")
    await world.write(chain(1))
    (decision,) = await board.apply([HintAction("p", HintKind.PREFETCH)], private, world.store)
    assert decision == accepted(1, action_id="p")


@run
async def test_actions_after_the_end_of_the_store_are_deferred(world):
    board = HintBoard(MAX_TTL_SECONDS)
    await world.store.close()
    decision = await decide(board, world, retain(), chain(1))
    assert decision == HintDecision("retain", HintOutcome.DEFERRED, "the cache is being replaced")


@run
async def test_windows_count_with_the_rows_that_a_hit_needs(world):
    groups = KVGroup(0, 16, SIZE), KVGroup(1, 16, SIZE, 300, GroupKind.SLIDING_WINDOW)
    chains = Chains(CHUNK_TOKENS, groups, (chain(6), chain(6, start=50)))
    hinted = prompt([])._replace(chains=chains)
    (decision,) = await HintBoard(MAX_TTL_SECONDS).apply([retain()], hinted, world.store)
    assert (decision.outcome, decision.num_tokens) == (CLIPPED, 2 * CHUNK_TOKENS)
    assert held(world, [*chain(6), *chain(6, start=50)]) == 4
