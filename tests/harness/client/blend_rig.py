"""The scheduler side of an engine that blends prompts, over a sidecar double."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace

from lmcache_client.core.blend_jobs import Blended
from lmcache_client.core.jobs import WorkerReport
from lmcache_client.core.requests import Ticket
from lmcache_client.vllm.attach import VLLMSettings
from lmcache_client.vllm.blend import documents
from lmcache_client.vllm.blend.scheduler import BlendingScheduler
from lmcache_client.vllm.blend.separator import Separator
from lmcache_store import keys
from lmcache_store.tiers.memory.contracts import Slot
from tests.harness.client.scheduler_rig import GRID, IDENTITY, Rig, blocks
from tests.harness.sidecar.wire import NAMESPACE

BLENDING = replace(IDENTITY, can_blend=True)
STEP_TOKENS = 1000
NO_SEPARATOR = Separator()
FIND = {"lmcache": {"blend": True}}
"""Parameters of a request whose documents the engine must find."""


def fake_hashes(tokens, salt=None):
    """Chained hashes of the full blocks of a prompt."""
    parent, hashes = (salt or "").encode(), []
    for end in range(GRID.hash_tokens, len(tokens) + 1, GRID.hash_tokens):
        parent = hashlib.sha256(parent + repr(list(tokens[end - GRID.hash_tokens : end])).encode()).digest()
        hashes.append(parent)
    return hashes


class FakeRequest(SimpleNamespace):
    """The fields of vLLM's ``Request`` that the connector uses."""

    def __init__(self, tokens, request_id="r", blend=None, **fields):
        defaults = {
            "request_id": request_id,
            "all_token_ids": list(tokens),
            "num_prompt_tokens": len(tokens),
            "num_computed_tokens": 0,
            "block_hashes": [],
            "lora_request": None,
            "mm_features": [],
            "prompt_embeds": None,
            "sampling_params": SimpleNamespace(prompt_logprobs=None),
            "cache_salt": None,
            "skip_reading_prefix_cache": False,
            "resumable": False,
            "kv_transfer_params": None if blend is None else {"lmcache": {"blend": blend}},
        }
        super().__init__(**(defaults | fields))
        self.update_block_hashes()

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def update_block_hashes(self):
        self.block_hashes += fake_hashes(self.all_token_ids, self.cache_salt)[len(self.block_hashes) :]


def document(number, num_tokens=200):
    """Tokens that no other document has."""
    return [number * 10_000 + position for position in range(num_tokens)]


QUESTION = [7] * 20


def prompt(*numbers, start=()):
    return [*start, *(token for number in numbers for token in document(number)), *QUESTION]


class BlendRig(Rig):
    """Hashes are made without vLLM, unless ``hashes`` says otherwise."""

    def __init__(self, monkeypatch, identity=BLENDING, num_ranks=1, separator=NO_SEPARATOR, **settings):
        self.num_ranks = num_ranks
        monkeypatch.setattr(
            documents, "hash_document", lambda tokens, request, *_: fake_hashes(tokens, request.cache_salt)
        )
        if num_ranks > 1:
            identity = replace(identity, hello=replace(identity.hello, num_columns=num_ranks))
        super().__init__(
            identity,
            make=BlendingScheduler,
            blend=VLLMSettings(**({"blend": "request", "blend_min_tokens": 100} | settings)),
            separator=separator,
            hash_algorithm="sha256",
            step_tokens=STEP_TOKENS,
        )

    def store_rows(self, tokens, num_rows=None, salt=""):
        """Let the sidecar hold the first rows of a document, by default all and the tail."""
        for block_hash in documents.key_hashes(GRID, fake_hashes(tokens, salt))[:num_rows]:
            (key,) = keys.chunk_keys([block_hash], cache_salt=salt)
            key = (self.scheduler._namespace + key).removeprefix(NAMESPACE)
            if key not in self.session.rows:
                self.session.rows[key] = slot = Slot(len(self.session.rows), 1)
                self.session.committed.append(slot)

    def ask(self, tokens, request_id="r", blend=None, computed=0, **fields):
        """Let a request arrive that asks to blend two documents by default. Returns it and the offer."""
        blend = {"documents": [200, 200]} if blend is None else blend
        request = self.arrive(FakeRequest(tokens, request_id, blend, **fields))
        return request, self.match(request, computed)

    def learn(self, *numbers, num_tokens=200, salt="", is_stored=True):
        """Let the engine know documents, whose rows the sidecar holds by default."""
        for number in numbers:
            tokens, ticket = document(number, num_tokens), Ticket("", [], self.scheduler._namespace, salt)
            self.scheduler._known.learn(tokens, num_tokens, ticket)
            if is_stored:
                self.store_rows(tokens, salt=salt)

    def send(self, tokens, request_id="r", params=FIND, **fields):
        """Let a request with these ``kv_transfer_params`` arrive. Returns it."""
        return self.arrive(FakeRequest(tokens, request_id, kv_transfer_params=params, **fields))

    def blending(self, request_id="r", computed=0, first_block=100, **fields):
        """Let a request arrive whose prompt is blended. Returns it, and its job."""
        for number in (1, 2):
            self.store_rows(document(number))
        request, (num_tokens, is_async) = self.ask(prompt(2, 1), request_id, computed=computed, **fields)
        assert (num_tokens, is_async) == (request.num_tokens - 1 - computed, True)
        self.allocate(request, blocks(-(-request.num_tokens // 32), first_block), num_tokens)
        (job,) = self.step().blend.jobs
        return request, job

    def leases(self):
        self.drain_lookups()
        return self.session.leased

    def report_blends(self, placed=(), blended=(), failed=(), received=()):
        report = WorkerReport(failed_loads=set(failed))
        report.blends_placed.update(placed)
        report.blended |= dict.fromkeys(blended, Blended(300, 60, 20))
        self.scheduler.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=report, finished_recving=set(received), finished_sending=set()
            )
        )
