"""Rows that a sidecar reads from the memory tier of another sidecar, with real sidecars."""

import pytest

from testing.certificates import make_certificates
from testing.peers import PeerSidecars
from tests.harness.client.blocking import PAGE_TOKENS, PageEngine, reattached, wait_released

PAGES = range(6)


def other_engine(sidecar, **options):
    return PageEngine(sidecar, engine_uuid=b"2" * 16, **options)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_pages_are_read_from_the_pod_that_has_them(tmp_path, num_groups):
    with PeerSidecars(tmp_path) as pods, PageEngine(pods.sidecars[0], num_groups=num_groups) as engine:
        engine.store(*PAGES)
        with other_engine(pods.sidecars[1], num_groups=num_groups) as other:
            assert other.run(*PAGES, 99) == len(PAGES)
            other.report(*PAGES, num_engine=0, num_loaded=len(PAGES))
            reader = pods.sidecars[1].wait_until(
                lambda stats: stats if stats["causes"]["prompt_tokens"] else None
            )
            assert reader["causes"]["cause_tokens"] == {"peers": len(PAGES) * PAGE_TOKENS}
            assert reader["peers"]["promoted"] == len(PAGES) * num_groups
            assert other.run(*PAGES) == len(PAGES), "now in its own memory"
            wait_released(pods.sidecars[1])
        server = pods.sidecars[0].wait_until(
            lambda stats: stats["peer_server"] if not stats["memory"]["leased_rows"] else None
        )
        assert server["read_columns"] == len(PAGES) * num_groups
        assert pods.sidecars[1].stats()["peer_server"]["read_columns"] == 0


def test_restarted_pod_serves_its_rows_before_its_engine_uses_them(tmp_path):
    with PeerSidecars(tmp_path) as pods, PageEngine(pods.sidecars[0]) as engine:
        engine.store(*PAGES)
        pods.sidecars[0].settled()
        before = engine.client.session
        pods.sidecars[0].restart()
        reattached(engine, before)
        reader = pods.sidecars[1]
        reader.wait_until(lambda stats: not stats["peers"]["servers"][0]["problem"])
        with other_engine(reader) as other:
            assert other.run(*PAGES) == len(PAGES)
        stats = pods.sidecars[0].stats()
        assert (stats["peer_server"]["read_columns"], stats["memory"]["verified"]) == (len(PAGES), len(PAGES))


def test_rows_of_a_private_namespace_are_not_served(tmp_path):
    with PeerSidecars(tmp_path) as pods, PageEngine(pods.sidecars[0], private_reason="a test") as engine:
        engine.store(*PAGES)
        assert engine.run(*PAGES) == len(PAGES)
        with other_engine(pods.sidecars[1]) as other:
            assert other.run(*PAGES) == 0
        assert pods.sidecars[0].stats()["peer_server"]["read_columns"] == 0


def test_list_and_password_change_while_they_run(tmp_path):
    with PeerSidecars(tmp_path) as pods, PageEngine(pods.sidecars[0]) as engine:
        engine.store(*PAGES)
        reader = pods.sidecars[1]
        pods.set_peers(pods.names[1])
        reader.wait_until(lambda stats: stats["peers"]["servers"] == [])
        pods.passwords.write_text("another\nsecret\n")
        pods.set_peers(*pods.names)
        reader.wait_until(lambda stats: len(stats["peers"]["servers"]) == 1)
        with other_engine(reader) as other:
            assert other.run(*PAGES) == len(PAGES)


def test_pod_without_the_password_reads_nothing(tmp_path):
    with PeerSidecars(tmp_path) as pods, PageEngine(pods.sidecars[0]) as engine:
        engine.store(*PAGES)
        wrong = tmp_path / "wrong"
        wrong.write_text("guess\n")
        reader = pods.sidecars[1]
        reader.kill()
        reader.options["peer_password_file"] = wrong
        reader.restart()
        with other_engine(reader) as other:
            assert other.run(*PAGES) == 0
            (server,) = reader.stats()["peers"]["servers"]
            assert "WRONGPASS" in server["problem"]
        assert pods.sidecars[0].stats()["peer_server"]["read_columns"] == 0
        # The server counts a refusal after it has answered.
        pods.sidecars[0].wait_until(lambda stats: stats["peer_server"]["refused_connections"])


def test_pages_are_read_over_tls(tmp_path):
    made = make_certificates(tmp_path)
    for part, name in ((made.ca, "ca.crt"), (made.cert, "tls.crt"), (made.key, "tls.key")):
        part.rename(tmp_path / name)
    with PeerSidecars(tmp_path, peer_tls_dir=tmp_path) as pods, PageEngine(pods.sidecars[0]) as engine:
        engine.store(*PAGES)
        with other_engine(pods.sidecars[1]) as other:
            assert other.run(*PAGES) == len(PAGES)
        assert pods.sidecars[0].stats()["peer_server"]["read_columns"] == len(PAGES)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_pod_that_stops_hands_its_hottest_rows_over(tmp_path, num_groups):
    with PeerSidecars(tmp_path) as pods, other_engine(pods.sidecars[1], num_groups=num_groups) as other:
        with PageEngine(pods.sidecars[0], num_groups=num_groups) as engine:
            for page in range(12):
                engine.store(page)
            for page in (0, 1, 2, 9):  # the hottest
                assert engine.run(page) == 1
            wait_released(pods.sidecars[0])
        pods.sidecars[0].terminate()
        stats = pods.sidecars[1].stats()
        assert stats["peer_server"]["taken_rows"] == 6 * num_groups
        assert stats["memory"]["used_rows"] == 6 * num_groups
        assert f"Other pods took {6 * num_groups} of {6 * num_groups} rows over" in pods.sidecars[0].log
        assert [other.run(page) for page in (0, 1, 2, 9, 3, 4)] == [1, 1, 1, 1, 0, 0]
