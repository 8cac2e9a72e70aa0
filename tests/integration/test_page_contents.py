"""Pages and the log of a real sidecar contain no tokens, no salts and no row keys."""

import base64
import json
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_store import keys
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import only_engine, wait_reported

pytestmark = pytest.mark.vllm

SETTINGS = SimSettings(num_blocks=256)
SALTS = ("salt-of-search-7f3a", "salt-without-a-name-91c2")
PAGES = ("/metrics", "/stats", "/samples", "/requests", "/hints", "/healthz", "/readyz")
TOKENS = random.Random("tokens").sample(range(10**8, 2 * 10**8), 4 * CHUNK + 7)
"""Tokens of nine digits, so that no other number of a page equals one by chance."""

_FULL_KEY_HEX = 32  # digits: 128 of a row key's 256 bits or more are a row key


def texts_of(content: bytes) -> set[str]:
    """Return the forms in which a page could contain these bytes."""
    return {content.hex(), base64.b64encode(content).decode().rstrip("="), repr(content)[2:-1]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    """All pages and the log by name, after hits, misses and a divergence of three tenants; the disk tier."""
    folder = tmp_path_factory.mktemp("pages")
    tenants = folder / "tenants"
    tenants.write_text(f"named: [{{name: search, saltHash: {keys.salt_hash(SALTS[0]).hex()}}}]")
    options = {"disk_path": folder / "disk", "tenants_file": tenants}
    with only_engine(SETTINGS, **options) as (sidecar, engine):
        other = [*TOKENS[: CHUNK + 3], *TOKENS[::-1]]
        for salt in (*SALTS, None):
            for tokens in (TOKENS, TOKENS, other):
                engine.serve(tokens, salt=salt)
        wait_reported(engine)
        sidecar.settled()
        pages = {path: sidecar.get(path) for path in PAGES}
        yield {**pages, "log": sidecar.log}, folder / "disk"


def test_pages_describe_the_requests(served) -> None:
    """Otherwise the other tests would pass with empty pages."""
    pages, _ = served
    assert len(json.loads(pages["/requests"])["requests"]) >= 9
    assert json.loads(pages["/samples"])["key"]
    assert json.loads(pages["/stats"])["causes"]["branches"]
    assert 'lmcache_tenant_hit_tokens_total{tenant="search"}' in pages["/metrics"]


def test_pages_contain_no_tokens(served) -> None:
    pages, _ = served
    texts = {str(token) for token in TOKENS} | {f"{token:x}" for token in TOKENS}
    for order in "<>":
        for size in "iq":
            texts |= {text for token in TOKENS for text in texts_of(struct.pack(order + size, token))}
    for name, page in pages.items():
        words = set(re.findall(r"[0-9A-Za-z+/]+", page))
        assert not texts & words, f"{name} has tokens"
        assert not [text for text in texts if len(text) > 8 and text in page], f"{name} has tokens"


def test_pages_contain_no_salts(served) -> None:
    pages, _ = served
    for name, page in pages.items():
        for salt in SALTS:
            hidden = {salt, *texts_of(salt.encode()), keys.salt_hash(salt).hex()}
            assert not [text for text in hidden if text in page], f"{name} has a salt, or its hash"


def test_pages_contain_no_row_keys(served) -> None:
    """A reader of Redis or of a disk cannot match rows with requests by them."""
    pages, disk = served
    files = [path for path in disk.rglob("*") if path.is_file()]  # folders have the name of a namespace
    row_keys = {match for path in files for match in re.findall("^[0-9a-f]{64}", path.name)}
    assert len(row_keys) >= 3 * 4, "each tenant's chunks are on disk"
    for name, page in pages.items():
        for key in row_keys:
            starts = range(0, len(key) - _FULL_KEY_HEX + 1, 2)
            parts = {key[start : start + _FULL_KEY_HEX] for start in starts}
            assert not [part for part in parts if part in page], f"{name} has a row key"
