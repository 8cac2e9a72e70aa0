"""The connector's scheduler side of an engine of several parts, with doubles of the other parts."""

import itertools
from types import SimpleNamespace

import numpy as np

from lmcache_client.core.parts import Hint, PartAnswer, PartedIdentity, PartedReport
from lmcache_store import keys
from lmcache_store.tiers.base import KEY_BYTES
from tests.harness.client.scheduler_rig import GRID, Rig, hashes, make_identity, make_request


class Part:
    """Another part: answers hints as the worker side does, with the rows in ``rows``."""

    def __init__(self, number):
        self.number = number
        self.rows: set[bytes] = set()  # chunk keys
        self.num_expected = None
        self.is_probing = False
        self.hints: dict[str, list[bytes]] = {}
        self.calls = []  # without hints

    def take(self, relays):
        """Return answers by request."""
        answers = {}
        for relay in relays:
            if not isinstance(relay, Hint):
                self.calls.append(relay)
                continue
            known = self.hints.get(relay.request_id)
            if known is None or (relay.chunk_keys and not relay.first_chunk):
                known = [b""] * len(relay.chunk_keys) if not relay.first_chunk else []
            if relay.chunk_keys and known:
                assert len(known[0]) == relay.first_chunk * KEY_BYTES
                known = [old + new for old, new in zip(known, relay.chunk_keys, strict=True)]
                self.hints[relay.request_id] = known
            answers[relay.request_id] = self.answer(relay.number, known)
        return answers

    def answer(self, number, chunk_keys):
        present = [
            [joined[first : first + KEY_BYTES] in self.rows for first in range(0, len(joined), KEY_BYTES)]
            for joined in chunk_keys
        ]
        num_resident = min((len(list(itertools.takewhile(bool, flags))) for flags in present), default=0)
        residency = tuple(np.packbits(flags).tobytes() for flags in present)
        return PartAnswer(number, residency, max(num_resident, self.num_expected or 0), self.is_probing)


class PartedRig(Rig):
    """A scheduler side with part 0's sidecar double and other parts."""

    def __init__(self, *groups, num_parts=2, num_batches=1, **settings):
        whole = make_identity(*groups)
        sizes = {"num_parts": num_parts, "num_ranks": num_parts, "num_batches": num_batches}
        super().__init__(PartedIdentity(whole.hello, whole.hash_tokens, part=0, **sizes), **settings)
        self.parts = [Part(number) for number in range(1, num_parts)]
        self.answers = {}  # of the last step
        self.relays = []  # of all steps

    def have(self, num_chunks, *parts, name="p"):
        """Let parts have the first chunks of a prompt, by default all other parts."""
        chunk_hashes = GRID.chunk_hashes(hashes(4096, name), 0, num_chunks)
        for part in parts or self.parts:
            part.rows = set(keys.chunk_keys(chunk_hashes))

    def step(self, *args, **fields):
        meta = super().step(*args, **fields)
        relays = getattr(meta, "relays", [])
        self.relays += relays
        self.answers = {}
        for part in self.parts:
            for request_id, answer in part.take(relays).items():
                self.answers.setdefault(request_id, {})[part.number] = answer
        return meta

    def output(self, answers=None, received=(), **fields):
        """Receive the output of a step. ``answers``: by default those to the last step."""
        answers, self.answers = self.answers if answers is None else answers, {}
        report = PartedReport(**fields, answers=answers)
        self.scheduler.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=report, finished_recving=set(received), finished_sending=set()
            )
        )

    def turn(self, *args, **fields):
        """Do a step, and receive its output with the answers."""
        meta = self.step(*args, **fields)
        self.output()
        return meta

    def calls(self):
        """Return the types and ids of all relays so far."""
        return [(type(relay), relay.request_id) for relay in self.relays]


def known(rig, num_chunks=3):
    """Let all parts have chunks, and the scheduler side know this."""
    rig.stored(num_chunks)
    rig.have(num_chunks)
    request = rig.arrive(make_request(200, "known"))
    rig.turn()
    rig.finish(request)
    rig.turn()
    rig.relays.clear()
