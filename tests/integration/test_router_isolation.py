"""vLLM's router: whether the prompt of one tenant decides where the prompt of another tenant goes.

A tenant sends a prompt, and its engine does not answer yet. Another tenant sends a guess of this prompt. If
the guess waits at the same engine, and other prompts do not, then response times reveal prompts.
"""

import contextlib
import json
import random
import string
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.api.router import POLICIES
from lmcache_operator.components.router.pod import _POLICY
from lmcache_operator.errors import InvalidSpecError
from testing.child_process import wait_until
from testing.router import RouterProcess
from tests.harness.commands.json_server import JsonHandler, serving
from tests.harness.operator.model import cluster

pytestmark = pytest.mark.vllm

NUM_ENGINES, NUM_TRIALS = 4, 8
START_SECONDS = 300.0
HELD = 7
"""Seed of a request whose engine waits."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "text": lambda text: {"prompt": text},
    "tokens": lambda text: {"prompt": list(text.encode())},
    "chat": lambda text: {"messages": [{"role": "user", "content": text}]},
}


class Engine(JsonHandler):
    """An engine that records its prompts, and tokenizes prompts for the router if ``can_tokenize``."""

    protocol_version = "HTTP/1.1"
    received: list[int]
    number: int
    can_tokenize: bool
    is_released: threading.Event

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self) -> None:
        body = self.body()
        if not self.path.endswith("/render"):
            self.received.append(self.number)
            if body.get("seed") == HELD:
                self.is_released.wait(START_SECONDS)
            choice = {"index": 0, "text": "x", "message": {"role": "assistant", "content": "x"}}
            self.answer({"id": "1", "object": "text_completion", "model": "tiny", "choices": [choice]})
        elif not self.can_tokenize:
            self.send_error(404)
        else:
            text = body.get("prompt") or json.dumps(body["messages"])
            rendered = {"token_ids": list(text.encode())}
            self.answer([rendered] if "prompt" in body else rendered)


class Routed(NamedTuple):
    """A router in front of engines."""

    url: str
    received: list[int]
    is_released: threading.Event

    def send(self, kind: str, text: str, tenant: dict[str, str], **fields: Any) -> None:
        """Send a prompt of a tenant, which is a header or a field of the body."""
        headers = {"Content-Type": "application/json"}
        (headers if "X-LMCache-Tenant" in tenant else fields).update(tenant)
        body = {"model": "tiny", "max_tokens": 1, **BODIES[kind](text), **fields}
        path = CHATS if kind == "chat" else COMPLETIONS
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def meet(self, kind: str, prompts: tuple[str, str], tenants: tuple[dict[str, str], ...]) -> bool:
        """Return whether the second prompt reaches the engine that computes the first one."""
        self.received.clear()
        self.is_released.clear()
        held = threading.Thread(target=self.send, args=(kind, prompts[0], tenants[0]), kwargs={"seed": HELD})
        held.start()
        wait_until(lambda: self.received, what="the first prompt is at an engine")
        self.send(kind, prompts[1], tenants[1])
        is_met = self.received[0] == self.received[1]
        self.is_released.set()
        held.join()
        return is_met

    def num_met(self, kind: str, place: str, *, are_equal: bool = True, is_guess: bool = True) -> int:
        """Return how many second prompts of ``NUM_TRIALS`` reach the engine of the first one.

        Args:
            kind: what a prompt consists of.
            place: where the salts are, ``header``, ``body`` or, for one tenant only, ``own``.
            are_equal: the prompts are equal. Otherwise only their beginning is.
            is_guess: the second prompt begins like the first one.
        """
        field = "X-LMCache-Tenant" if place == "header" else "cache_salt"
        tenants = tuple({field: f"salt-{0 if place == 'own' else number}"} for number in range(2))
        ends = ("", "") if are_equal else ("a", "b")
        total = 0
        for _ in range(NUM_TRIALS):
            first = new_text()
            second = first if is_guess else new_text()
            total += self.meet(kind, (first + ends[0], second + ends[1]), tenants)
        return total


def new_text() -> str:
    return "".join(random.choices(string.ascii_lowercase, k=600))


@contextlib.contextmanager
def routed(policy: str, *, can_tokenize: bool = True, has_prefill: bool = False) -> Iterator[Routed]:
    received, is_released = list[int](), threading.Event()
    shared = {"received": received, "is_released": is_released, "can_tokenize": can_tokenize}
    with contextlib.ExitStack() as stack:
        urls = []
        for number in range(NUM_ENGINES):
            engine = stack.enter_context(serving(Engine, number=number, **shared))
            urls.append(f"http://127.0.0.1:{engine.server_port}")
        pools = [word for url in urls[:2] for word in ("--prefill", url)]
        pools += [word for url in urls[2:] for word in ("--decode", url)]
        arguments = ("--vllm-pd-disaggregation", *pools) if has_prefill else ()
        router = RouterProcess(() if has_prefill else urls, *arguments, f"--policy={policy}")
        stack.enter_context(contextlib.closing(router))
        router.start(timeout=START_SECONDS)
        yield Routed(router.url, received, is_released)


def is_accepted(policy: str, place: str) -> bool:
    spec = {"tenants": {"header": place == "header"}, "router": {"policy": policy}}
    with contextlib.suppress(InvalidSpecError):
        parse(cluster(**spec))
        return True
    return False


# KVAware is refused because KV events contain salts.
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "KVAware"])
def test_policies_that_reveal_prompts_of_other_tenants_are_refused(policy: str) -> None:
    """If this fails for a new router, correct the rules of ``tenants`` and the guide."""
    with routed(_POLICY[policy]) as router:
        for place in ("header", "body"):
            numbers = {kind: router.num_met(kind, place) for kind in BODIES}
            if is_accepted(policy, place):
                assert set(numbers.values()) == {0}, (place, numbers)
            else:
                assert numbers["text"] == NUM_TRIALS, "a guess meets the prompt"
                assert router.num_met("text", place, is_guess=False) < NUM_TRIALS, "another prompt does not"


def test_header_with_cache_aware_reveals_the_beginning_of_each_kind_of_prompt() -> None:
    assert not is_accepted("CacheAware", "header")
    with routed("cache_aware") as router:
        for kind in BODIES:
            assert router.num_met(kind, "header", are_equal=False) == NUM_TRIALS
            assert router.num_met(kind, "header", is_guess=False) == 0


@pytest.mark.parametrize("has_prefill", [False, True])
def test_prompts_follow_their_beginning_within_a_tenant_only(has_prefill: bool) -> None:
    with routed("cache_aware", has_prefill=has_prefill) as router:
        for kind in BODIES:
            assert router.num_met(kind, "own", are_equal=False) == NUM_TRIALS
            assert router.num_met(kind, "body", are_equal=False) == 0


def test_prompts_of_text_do_not_follow_their_beginning_if_engines_do_not_tokenize() -> None:
    """vLLM >= 0.32 needs the operator's middleware, and SGLang can't. If this fails, correct the guide."""
    with routed("cache_aware", can_tokenize=False) as router:
        assert router.num_met("tokens", "own", are_equal=False) == NUM_TRIALS
        for kind in ("text", "chat"):
            assert router.num_met(kind, "own", are_equal=False) < NUM_TRIALS
