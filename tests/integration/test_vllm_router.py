"""vLLM's router in front of real engines: requests go to the engine whose sidecar has their KV."""

import contextlib
import itertools
import json
import random
import string
import struct
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from testing.child_process import wait_until
from testing.router import RoutedPod, RouterProcess

pytestmark = pytest.mark.vllm

CHUNK = 256
NUM_CHUNKS = 4


class Listener:
    """A subscriber of an engine's KV events, which knows the chunks in the sidecar's memory."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.ipv6 = True
        self._socket.subscribe("")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.last_event = -1
        self.chunks: set[tuple[int, ...]] = set()

    def has_reported(self, prompts: list[list[int]]) -> bool:
        """Take the events since the last call. True: the prompts' full chunks were reported."""
        while self._socket.poll(0):
            _, sequence, payload = self._socket.recv_multipart()
            (self.last_event,) = struct.unpack(">q", sequence)
            for event in self._decoder.decode(payload).events:
                if isinstance(event, BlockStored) and event.medium == "CPU":
                    self.chunks.add(tuple(event.token_ids))
        starts = range(0, NUM_CHUNKS * CHUNK, CHUNK)
        return all(
            tuple(prompt[start : start + CHUNK]) in self.chunks for prompt in prompts for start in starts
        )

    def close(self) -> None:
        self._socket.close(linger=0)


def place(pod: RoutedPod, prompts: list[list[int]]) -> int:
    """Compute prompts until their chunks are reported. Returns the number of the last event."""
    with contextlib.closing(Listener(pod.events)) as listener:

        def are_reported() -> bool:
            for prompt in prompts:
                pod.engine.complete(prompt, max_tokens=2)
            return listener.has_reported(prompts)

        wait_until(are_reported, timeout=300, what="events of all chunks")
        return listener.last_event


def make_texts(count: int, seed: str) -> list[str]:
    """Return prompts for the tiny model, whose tokenizer makes a token of each byte."""
    numbers = random.Random(seed)
    return ["".join(numbers.choices(string.ascii_lowercase, k=NUM_CHUNKS * CHUNK + 3)) for _ in range(count)]


def post(url: str, **body: Any) -> Any:
    data = json.dumps({"model": "tiny", **body}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RoutedPod]]:
    folder = tmp_path_factory.mktemp("pods")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RoutedPod(folder / f"engine-{n}", topic="kv")) for n in range(2)]


def test_requests_go_to_the_engine_whose_sidecar_has_their_kv(pods: list[RoutedPod]) -> None:
    """The router reads events by IPv4, which is all that it can, and the listeners read them by IPv6."""
    with RouterProcess([pod.engine.url for pod in pods], "--policy=kv_aware") as router:
        texts = [make_texts(2, f"text {number}") for number in range(2)]
        tokens = [
            [post(f"{pod.engine.url}/tokenize", prompt=text)["tokens"] for text in placed]
            for pod, placed in zip(pods, texts, strict=True)
        ]
        last_events = [place(pod, placed) for pod, placed in zip(pods, tokens, strict=True)]
        for pod, last in zip(pods, last_events, strict=True):
            is_learned = partial(has_taken, router, pod.instance, last)
            wait_until(is_learned, what="the router takes all events")
        # Prompts of text, and of tokens, of both engines in turn.
        for prompts in (texts, tokens):
            for prompt in itertools.chain(*zip(*prompts, strict=True)):
                answer = post(f"{router.url}/v1/completions", prompt=prompt, max_tokens=1, temperature=0)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_CHUNKS * CHUNK


def num_tokens(pod: RoutedPod) -> float:
    """Return the number of prompt tokens that an engine got."""
    return pod.engine.metrics("vllm:prompt_tokens_total")["vllm:prompt_tokens_total"]


def are_busier(pods: list[RoutedPod], num_before: float) -> bool:
    return sum(map(num_tokens, pods)) > num_before


def test_prompts_of_text_go_to_the_engine_that_got_their_beginning(pods: list[RoutedPod]) -> None:
    """While one engine is busy, a prompt goes to the other one. Later, both are idle."""
    long_answer = {"prompt": [1, 2, 3], "max_tokens": 300, "ignore_eos": True}
    with RouterProcess([pod.engine.url for pod in pods], "--policy=cache_aware") as router:
        url = f"{router.url}/v1/completions"

        def engine_of(text: str) -> int:
            before = [num_tokens(pod) for pod in pods]
            post(url, prompt=text, max_tokens=1)
            grown = [num_tokens(pod) - number for pod, number in zip(pods, before, strict=True)]
            return grown.index(max(grown))

        for path in ("/render", "/%72ender", "/render%0A"):
            rendered = post(url + path, prompt="hi", cache_salt="secret of a tenant")
            assert rendered[0]["token_ids"]
            assert "secret" not in json.dumps(rendered)
        for text in make_texts(6, "remembered"):
            num_before = sum(map(num_tokens, pods))
            busy = threading.Thread(target=partial(post, url, **long_answer))
            busy.start()
            wait_until(partial(are_busier, pods, num_before), what="an engine is busy")
            chosen = engine_of(text)
            busy.join()
            assert engine_of(f"{text} and more") == chosen


def has_taken(router: RouterProcess, instance: str, event: int) -> bool:
    return router.last_event(instance) >= event
