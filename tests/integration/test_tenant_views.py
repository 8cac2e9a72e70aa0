"""Pages and ``explain`` of a real sidecar name tenants, and never show salts."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_store import keys
from testing.processes import SidecarProcess
from testing.workloads.replay import Engine
from testing.workloads.requests import TOKENS
from tests.harness.commands.sidecar_command import explain

ROW_BYTES, NAMESPACE = 256 << 10, bytes(32)
NAMED = {"search": "salt-of-search", "batch": "salt-of-batch"}
UNNAMED = "salt-without-a-name"


def tenants_file(path: Path) -> str:
    hashes = {name: keys.salt_hash(salt).hex() for name, salt in NAMED.items()}
    path.write_text(f"""
named:
- {{name: search, saltHash: {hashes["search"]}, minMemoryPercent: 100}}
- {{name: batch, saltHash: {hashes["batch"]}, lowerTierBytes: 1}}
""")
    return str(path)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory) -> Iterator[SidecarProcess]:
    """The tenant search hit one prompt of two. The memory has only its rows, so others are refused."""
    folder = tmp_path_factory.mktemp("tenants")
    with (
        SidecarProcess(
            memory_size="64Mi", tenants_file=tenants_file(folder / "tenants"), disk_path=folder / "disk"
        ) as sidecar,
        contextlib.ExitStack() as stack,
    ):
        tenants = [keys.tenant(salt, NAMESPACE) for salt in (NAMED["search"], NAMED["batch"], UNNAMED, "")]
        engines = (contextlib.closing(Engine(sidecar, NAMESPACE, ROW_BYTES, tenant=each)) for each in tenants)
        search, batch, unnamed, unsalted = map(stack.enter_context, engines)
        batch.serve("b-1", tuple(range(10)))
        sidecar.wait_until(lambda stats: stats["tenants"]["disk_refused"]["batch"] == 10)
        search.serve("s-1", tuple(range(100, 120)))
        search.serve("s-2", tuple(range(100, 120)))
        sidecar.settled()
        num_rows = sidecar.stats()["memory"]["usable_rows"]
        search.serve("s-3", tuple(range(1000, 1000 + num_rows)))
        sidecar.settled()
        unnamed.serve("u-1", (5000, 5001))
        unsalted.serve("n-1", (6000,))
        yield sidecar


def series(sidecar: SidecarProcess, name: str) -> dict[str, float]:
    """Values of a metric of tenants by name."""
    start = f"lmcache_tenant_{name}{{tenant="
    lines = [line for line in sidecar.get("/metrics").splitlines() if line.startswith(start)]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_have_the_names_of_the_file(sidecar):
    usable = sidecar.stats()["memory"]["usable_bytes"]
    assert series(sidecar, "guaranteed_bytes") == {"default": 0, "search": usable, "batch": 0}
    assert series(sidecar, "bound_bytes") == dict.fromkeys(("default", "search", "batch"), usable)
    assert series(sidecar, "hit_tokens_total") == {"default": 0, "search": 20 * TOKENS, "batch": 0}
    assert series(sidecar, "prompt_tokens_total")["default"] == 3 * TOKENS
    assert series(sidecar, "rows")["default"] == 0
    assert series(sidecar, "refused_total")["default"] == 3
    assert series(sidecar, "disk_bound_bytes") == {"batch": 1}
    assert series(sidecar, "disk_bytes") == {"batch": 0}
    assert series(sidecar, "disk_refused_total") == {"batch": 10}


def test_requests_name_their_tenant(sidecar):
    page = json.loads(sidecar.get("/requests"))["requests"]
    named = {request["request_id"]: request["tenant"] for request in page}
    assert named == {
        "s-1": "search", "s-2": "search", "s-3": "search",
        "b-1": "batch", "u-1": "default", "n-1": "default",
    }  # fmt: skip
    status, text = explain(sidecar, "--request-id", "s-2")
    assert (status, "Its tenant is search.\n" in text) == (0, True)


def test_explain_shows_one_tenant_and_lists_all(sidecar):
    status, text = explain(sidecar, "--tenant", "search")
    assert status == 0
    assert text.startswith("Tenant search.\n")
    assert "memory tier" in text
    status, text = explain(sidecar, "--tenant", "default", "--output", "json")
    figures = json.loads(text)
    assert (figures["cause_tokens"], figures["refused"]) == ({"new": 3 * TOKENS}, 3)
    _, text = explain(sidecar)
    listed = [line.split()[0] for line in text.partition("TENANT ")[2].splitlines()[1:4]]
    assert listed == ["search", "batch", "default"]


def test_no_page_contains_a_salt_or_its_hash(sidecar):
    pages = [sidecar.get(path) for path in ("/stats", "/requests", "/metrics", "/samples")]
    pages += [explain(sidecar, *words)[1] for words in ((), ("--tenant", "default"))]
    for salt in (*NAMED.values(), UNNAMED):
        assert not any(salt in page or keys.salt_hash(salt).hex()[:16] in page for page in pages)
        on_the_wire = keys.tenant(salt, NAMESPACE).hex()[:16]
        assert not any(on_the_wire in page for page in pages[1:])
