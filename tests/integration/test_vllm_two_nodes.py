"""``vllm serve`` with ranks on two nodes, each with a sidecar.

The tests share an engine, which one of them restarts. Each answer must have the tokens of a cold run
(``TwoNodeWorld``).
"""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing import deadlines
from testing.child_process import wait_until
from testing.engine.environment import PIPELINE
from testing.engine.tiny_kinds import DEEPSEEK2
from testing.processes import RedisProcess
from tests.harness import scope
from tests.harness.client.real_engine import BLOCK, CHUNK
from tests.harness.client.two_nodes import (
    FOLLOWER,
    LEADER,
    ROWS,
    WHOLE,
    TwoNodeWorld,
    results,
    running,
)

pytestmark = [pytest.mark.vllm, pytest.mark.redis]

DEADLINES = deadlines.STANDARD
NODES = pytest.mark.parametrize("node", [LEADER, FOLLOWER], ids=["leader", "follower"])
BOTH = LEADER, FOLLOWER


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodeWorld]:
    yield from running(TwoNodeWorld(tmp_path_factory.mktemp("two-nodes")))


@pytest.fixture
def world(shared: TwoNodeWorld) -> TwoNodeWorld:
    shared.start()
    return shared


def test_rows_are_on_both_nodes_and_hit_as_a_whole(world: TwoNodeWorld) -> None:
    prompt = world.new_prompt()
    world.complete(prompt)
    for sidecar in world.sidecars:
        sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == ROWS)
    world.wait_hits(prompt)
    before = world.metrics()
    assert [world.complete(prompt) for _ in range(3)] == [WHOLE] * 3
    after = world.metrics()
    assert (after["loads"] - before["loads"], after["failed_loads"]) == (6, 0)


def test_rows_hit_as_a_whole_after_a_restart_of_the_engine(world: TwoNodeWorld) -> None:
    prompt = world.new_prompt()
    world.wait_hits(prompt)
    world.stop()
    world.start()
    world.wait_hits(prompt)
    assert world.metrics()["failed_loads"] == 0


@NODES
def test_sidecar_fails_during_loads(world: TwoNodeWorld, node: int) -> None:
    """The sidecar restarts on its arena, and then without the arena."""
    prompt, sidecar = world.new_prompt(), world.sidecars[node]
    world.wait_hits(prompt)
    with world.held(node, "load") as wait_load:
        answer = world.submit(prompt)
        wait_load()
        sidecar.kill()
    results([answer, world.submit(prompt)])
    sidecar.start()
    world.wait_hits(prompt)
    with world.held(node, "load") as wait_load:
        answer = world.submit(prompt)
        wait_load()
        world.wipe(node)
    answer.result()
    world.wait_hits(prompt)


@NODES
def test_sidecar_fails_during_stores(world: TwoNodeWorld, node: int) -> None:
    """The sidecar restarts on its arena, and then without the arena."""
    for restart in (world.sidecars[node].restart, lambda: world.wipe(node)):
        prompt = world.new_prompt()
        with world.held(node, "store") as wait_store:
            answer = world.submit(prompt)
            wait_store()
            restart()
        assert answer.result() == 0
        world.wait_hits(prompt)


@NODES
def test_sidecar_freezes(world: TwoNodeWorld, node: int) -> None:
    """The engine still hits rows that it knows."""
    prompt, other = world.new_prompt(), world.new_prompt()
    world.wait_hits(prompt)
    world.sidecars[node].freeze()
    try:
        assert results([world.submit(each) for each in (prompt, other)]) == [WHOLE, 0]
        results([world.submit(each) for each in (prompt, other)])
    finally:
        world.sidecars[node].thaw()
    world.wait_hits(prompt, other)


def test_follower_with_little_memory_evicts_what_the_leader_has(world: TwoNodeWorld) -> None:
    prompts = [world.new_prompt() for _ in range(3)]
    world.wipe(FOLLOWER, memory_size="6Mi")
    world.wait_attached()
    rows = [sidecar.stats()["memory"]["capacity_rows"] for sidecar in world.sidecars]
    assert rows[FOLLOWER] < len(prompts) * ROWS < rows[LEADER]
    for prompt in prompts * 2:
        world.complete(prompt)
    world.wait_hits(prompts[-1])
    world.wipe(FOLLOWER, memory_size="64Mi")
    world.wait_hits(prompts[0])


def test_each_part_promotes_its_rows_from_one_redis(world: TwoNodeWorld) -> None:
    """Both nodes lose their arenas. Then only the leader's node can reach Redis."""
    prompts = [world.new_prompt() for _ in range(2)]
    with RedisProcess() as redis:
        for node, url in ((LEADER, redis.url), (FOLLOWER, redis.unix_url)):
            world.wipe(node, remote_url=url)
        world.wait_attached()
        world.wait_hits(*prompts)
        for sidecar in world.sidecars:
            sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])

        def lose_arenas() -> None:
            for node in BOTH:
                world.wipe(node)
            world.wait_attached()

        def num_promoted() -> list[int]:
            return [sidecar.stats()["remote"]["promoted"] for sidecar in world.sidecars]

        def promotes_all() -> bool:
            """An idle engine computes a prompt whose rows come late, as on a machine without a free core."""
            lose_arenas()
            world.wait_hits(*prompts)
            return num_promoted() == [2 * ROWS] * 2

        wait_until(promotes_all)
        hidden = redis.socket_path.with_name("hidden")
        with redis.client as client:
            assert client.dbsize() == 2 * 2 * ROWS
            redis.socket_path.rename(hidden)
            client.client_kill_filter(_type="normal", skipme=True)
        lose_arenas()
        assert results([world.submit(prompt) for prompt in prompts]) == [0, 0]
        assert num_promoted()[FOLLOWER] == 0
        hidden.rename(redis.socket_path)
        world.wait_hits(*prompts)
        for node in BOTH:
            del world.sidecars[node].options["remote_url"]
            world.wipe(node)
    world.wait_hits(*prompts)


def retransmissions() -> int:
    """TCP segments that the network of this thread sent again."""
    names, values = (
        line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    return int(values[names.index("RetransSegs")])


def test_partition_of_the_network_delays_answers(world: TwoNodeWorld) -> None:
    prompt, other = world.new_prompt(), world.new_prompt()
    world.wait_hits(prompt)
    num_lost = world.nodes.submit(retransmissions).result()
    world.nodes.cut()
    try:
        answers = [world.submit(each) for each in (prompt, other)]
        wait_until(lambda: world.nodes.submit(retransmissions).result() >= num_lost + 3)
    finally:
        world.nodes.heal()
    results(answers)
    world.wait_hits(prompt, other)


def test_streams_meet_random_faults(world: TwoNodeWorld) -> None:
    rng = random.Random(scope.seed())
    prompts = [world.new_prompt(number * 2 * CHUNK + BLOCK) for number in range(1, 5)]
    for prompt in prompts:
        world.complete(prompt)
    answers: list[int] = []
    is_over = threading.Event()

    def stream(seed: float) -> None:
        choices = random.Random(seed)
        while not is_over.is_set():
            answers.append(world.complete(choices.choice(prompts)))

    def wait_answers() -> None:
        number = len(answers) + rng.randrange(1, 5)
        wait_until(lambda: len(answers) >= number or any(each.done() for each in streams), what="answers")

    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, rng.random()) for _ in range(3)]
        try:
            for _ in range(scope.examples(12)):
                fail(world, rng.choice(BOTH), rng.choice(FAULTS), wait_answers)
        finally:
            is_over.set()
        for each in streams:
            each.result()
    world.wait_hits(*prompts)


FAULTS = "kill", "wipe", "freeze"


def fail(world: TwoNodeWorld, node: int, fault: str, wait_answers: Callable[[], None]) -> None:
    """Let a sidecar fail while the engine answers, and let it serve again."""
    wait_answers()
    sidecar = world.sidecars[node]
    if fault == "freeze":
        sidecar.freeze()
        try:
            wait_answers()
        finally:
            sidecar.thaw()
        return
    sidecar.kill()
    if fault == "wipe":
        sidecar.arena_path.unlink()
    wait_answers()
    sidecar.start()


def test_change_of_weights_reaches_both_nodes(world: TwoNodeWorld) -> None:
    """The last test of this engine, whose KV is private from now on."""
    prompt = world.new_prompt()
    world.wait_hits(prompt)
    world.post("/reset_prefix_cache?reset_external=true")
    world.wait_hits(prompt)
    world.post("/collective_rpc", method="reload_weights")
    assert world.complete(prompt) == 0
    world.wait_hits(prompt)


def test_each_node_has_a_replica_of_latents(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hits are compared with hits: other kernels compute whole prompts, and requests in a batch."""
    args = DEEPSEEK2.engine_args
    options = f"--dtype={args['dtype']}", f"--block-size={args['block_size']}"
    for world in running(TwoNodeWorld(tmp_path_factory.mktemp("latents"), *options, kind=DEEPSEEK2)):
        prompts = [world.new_prompt() for _ in range(3)]
        for prompt in prompts:
            world.complete(prompt)
        for sidecar in world.sidecars:
            sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 3 * ROWS)
        world.wait_hits(*prompts)
        before = world.metrics()
        assert [world.complete(prompt) for prompt in prompts] == [WHOLE] * 3
        after = world.metrics()
        assert (after["loads"] - before["loads"], after["failed_loads"]) == (6, 0)


def test_pipeline_stages_hit_together(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The engine computes two batches at the same time, one in the stage of each node."""
    options = "--tensor-parallel-size=1", "--pipeline-parallel-size=2"
    environment = {PIPELINE: "1"}
    for world in running(TwoNodeWorld(tmp_path_factory.mktemp("stages"), *options, environment=environment)):
        prompts = [world.new_prompt() for _ in range(4)]
        world.wait_hits(*prompts)
        before = world.metrics()
        new = [world.new_prompt() for _ in range(4)]
        answers = results([world.submit(prompt) for prompt in (*prompts, *new, *prompts)])
        assert answers == [WHOLE] * 4 + [0] * 4 + [WHOLE] * 4
        after = world.metrics()
        assert (after["loads"] - before["loads"], after["failed_loads"]) == (16, 0)
        world.wipe(FOLLOWER)
        results([world.submit(prompt) for prompt in (*prompts, *new)])
        world.wait_hits(*prompts, *new)
