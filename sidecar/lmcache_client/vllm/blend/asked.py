"""State of requests that ask for a blended prompt, on the scheduler side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lmcache_client.core.blend_jobs import Blended
from lmcache_client.core.requests import RequestState, Ticket
from lmcache_client.vllm.blend.documents import Claim, ExactView
from lmcache_client.vllm.blend.params import BlendParams


@dataclass
class AskedBlend:
    """A request that asked for a blended prompt."""

    params: BlendParams
    view: ExactView
    is_isolated: bool = False
    """True if the request has the salt of blended prompts."""
    ticket: Ticket | None = None
    """The request's ticket when its documents were looked up; None: they were not yet."""
    documents: tuple[RequestState | None, ...] = ()
    """Lookups of the documents; None: the document is shorter than a block."""
    taken: set[int] = field(default_factory=set)
    """Numbers of the documents that have no exact rows. Their lookups ask for taken keys."""
    may_take: bool = True
    """True until the KV of these documents is being stored."""
    claim: Claim | None = None
    """The last offer to the engine; None: it was an offer of exact KV."""
    num_documents: int = 0
    """Documents whose KV the last load placed."""
    num_cached: int = 0
    """Most tokens that the engine had at a decision before the prompt was blended. A later start may have
    fewer of them, but the answer has begun."""
    blended: Blended | None = None

    def answer(self) -> dict[str, int]:
        """Return what the answer says about blending; empty: the answer is exact."""
        if not (self.blended or self.num_cached):
            return {}
        reused, recomputed, _ = self.blended or Blended(0, 0, 0)
        documents = {"documents": self.num_documents} if self.params.is_detected else {}
        return {"tokens": reused, "recomputed": recomputed, "cached": self.num_cached, **documents}


@dataclass
class OpenJob:
    """A prompt that the workers blend."""

    leased: list[Ticket]
    """Tickets of the documents that have leases."""
    num_missing: int
    """Ranks that have not placed the stored KV."""
    num_exact: int
    """Tokens of documents whose KV comes from the prompt's own rows."""
    is_dropped: bool = False

    @property
    def is_ready(self) -> bool:
        """True if the workers may run slices."""
        return not (self.num_missing or self.is_dropped)


def can_blend(request: Any) -> bool:
    """Return True if blended KV serves the request: it has only tokens, and asks only for an answer."""
    sampling = request.sampling_params
    return not (
        request.skip_reading_prefix_cache
        or request.lora_request is not None
        or request.mm_features
        or request.prompt_embeds is not None
        or sampling is None
        or sampling.prompt_logprobs is not None
    )
