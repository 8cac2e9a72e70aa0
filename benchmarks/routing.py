"""Route conversations over four real engines whose KV is only in their sidecars.

64 conversations have four turns each. The first prompt has 2,048 tokens. A later turn's prompt is the former
prompt and 100 new tokens. The first prompts go to the engines in turn, and the later ones to a router, in
random order. Four ways run after one another, with new conversations:

- **by cache**: vLLM's router with the policy ``kv_aware``, in front of four engines.
- **in turn**: the same with the policy ``round_robin``.
- **one cache**: one engine, whose sidecar has all conversations.
- **by cache, busy**: ``kv_aware`` with four clients at once, as many as there are engines. The router then
  weighs hits against the load of their engine.

A request *lands* if its engine has the longest prefix of its prompt, of all engines.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Report, at_least, of
from testing.child_process import wait_until
from testing.engine import fork_server
from testing.router import RoutedPod, RouterProcess

NUM_PODS, NUM_CONVERSATIONS, NUM_TURNS = 4, 64, 4
WAYS = {"by cache": ("kv_aware", 1), "in turn": ("round_robin", 1), "busy": ("kv_aware", 4)}
FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS, CHUNK_TOKENS = 2048, 100, 4, 256


@dataclass
class Conversation:
    """The tokens of a conversation, and how many of them each pod has computed."""

    tokens: list[int] = field(default_factory=list)
    computed: Counter[int] = field(default_factory=Counter)


@dataclass
class Outcome:
    """Counts of the requests after the first turn of each conversation."""

    num_requests: int = 0
    num_landed: int = 0
    hit_tokens: int = 0
    by_pod: Counter[int] = field(default_factory=Counter)


class Workload:
    """New conversations, sent to one URL."""

    def __init__(self, url: str, pods: list[RoutedPod], seed: int, num_clients: int = 1) -> None:
        self._url, self._pods, self._num_clients = url, pods, num_clients
        self._random = random.Random(seed)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Send all turns. A conversation's next turn follows after a turn of each other conversation."""
        conversations = [Conversation() for _ in range(NUM_CONVERSATIONS)]
        urls = [pod.engine.url for pod in self._pods]
        for each, url in zip(conversations, itertools.cycle(urls), strict=False):
            each.tokens += self._new_tokens(FIRST_TOKENS)
            self._note(each, self._ask(each, url), is_first=True)
        for pod in self._pods:  # an engine reports its last chunks in its next step
            pod.engine.complete(self._new_tokens(5), 2)
        with ThreadPoolExecutor(self._num_clients) as clients:
            for _ in range(NUM_TURNS - 1):
                self._random.shuffle(conversations)
                for each in conversations:
                    each.tokens += self._new_tokens(NEW_TOKENS)
                for each, answer in zip(conversations, clients.map(self._ask, conversations), strict=True):
                    self._note(each, answer, is_first=False)
        return self.outcome

    def _new_tokens(self, number: int) -> list[int]:
        return [self._random.randrange(4, 260) for _ in range(number)]

    def _ask(self, conversation: Conversation, url: str = "") -> dict[str, Any]:
        body = {"model": "tiny", "prompt": conversation.tokens, "max_tokens": ANSWER_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url or self._url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            result: dict[str, Any] = json.load(answer)
        return result

    def _note(self, conversation: Conversation, answer: dict[str, Any], *, is_first: bool) -> None:
        pod = self._pod_of(answer["id"])
        if not is_first:
            self.outcome.num_requests += 1
            is_longest = conversation.computed[pod] == max(conversation.computed.values())
            self.outcome.num_landed += is_longest
            self.outcome.hit_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.outcome.by_pod[pod] += 1
        conversation.computed[pod] = len(conversation.tokens)

    def _pod_of(self, request_id: str) -> int:
        """Return the number of the pod whose sidecar knows the request."""

        def find() -> list[int]:
            pages = (pod.sidecar.get(f"/requests?id={request_id}") for pod in self._pods)
            return [number for number, page in enumerate(pages, 1) if json.loads(page)["requests"]]

        (number,) = wait_until(find, what=f"request {request_id} in a sidecar")
        return int(number)


def warm_up(pod: RoutedPod) -> None:
    """Wait until the engine hits its own stored prompt, which proves that it is attached."""
    tokens = [random.randrange(4, 260) for _ in range(CHUNK_TOKENS + 50)]
    wait_until(
        lambda: pod.engine.complete(tokens, 1)["usage"]["prompt_tokens_details"]["cached_tokens"],
        timeout=120,
        what="a hit",
    )


def run() -> Report:
    outcomes = {}
    with fork_server.allowed(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pods = [
            stack.enter_context(RoutedPod(folder / f"engine-{number}", memory_size="1Gi"))
            for number in range(NUM_PODS)
        ]
        for pod in pods:
            warm_up(pod)
        urls = [pod.engine.url for pod in pods]
        outcomes["one"] = Workload(pods[0].engine.url, pods[:1], seed=0).run()
        for name, (policy, num_clients) in WAYS.items():
            with RouterProcess(urls, f"--policy={policy}") as router:
                outcomes[name] = Workload(router.url, pods, len(outcomes), num_clients).run()
    by_cache, in_turn, busy, single = (outcomes[name] for name in (*WAYS, "one"))
    spread = ", ".join(str(by_cache.by_pod[number]) for number in range(1, NUM_PODS + 1))
    return Report(
        "routing",
        f"{NUM_CONVERSATIONS} conversations, {NUM_TURNS} turns, {FIRST_TOKENS}, then {NEW_TOKENS} tokens, "
        f"{NUM_PODS} engines on CPUs without a prefix cache of their own. "
        f"Requests by engine with kv_aware: {spread}. Hit tokens of one large cache: {single.hit_tokens}.",
        [
            at_least("by cache: requests that land", _share(by_cache), "%", 95),
            of("in turn: requests that land", _share(in_turn), "%"),
            at_least(
                "by cache: hit tokens, of one cache", by_cache.hit_tokens / single.hit_tokens, "x", 0.95
            ),
            of("in turn: hit tokens, of one cache", in_turn.hit_tokens / single.hit_tokens, "x"),
            of("by cache, busy: requests that land", _share(busy), "%"),
            of("by cache, busy: hit tokens, of one cache", busy.hit_tokens / single.hit_tokens, "x"),
        ],
    )


def _share(outcome: Outcome) -> float:
    return 100 * outcome.num_landed / outcome.num_requests
