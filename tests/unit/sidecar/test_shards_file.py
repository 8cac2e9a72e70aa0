"""The file with the shards of the remote tier: its format, and handling of invalid files."""

import logging
from collections.abc import Iterator

import pytest

from lmcache_sidecar.files.shards import ShardsFile, read_shards
from lmcache_store.tiers.remote.address import Address, Endpoint
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardList

NOON = 1769860800.0  # 2026-01-31T12:00:00Z


@pytest.fixture
def tier() -> Iterator[RemoteTier]:
    tier = RemoteTier(Address.parse("redis://of-the-url"))
    yield tier
    tier.close()


def test_read_shards_parses_current_and_previous_shards():
    text = "current: [a.svc:6379, b]\nprevious:\n- a.svc:6380\nuntil: 2026-01-31T13:00:00+01:00\n"
    current = Endpoint("a.svc", 6379), Endpoint("b", 6379)
    assert read_shards("f", text) == ShardList(current, (Endpoint("a.svc", 6380),), NOON)
    assert read_shards("f", '{"current": ["b"]}') == ShardList((Endpoint("b", 6379),))
    assert read_shards("f", "current: [b]\nprevious: []\nuntil: never\n") == ShardList((Endpoint("b", 6379),))


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "f: current: name at least one shard"),
        ("current:\n", "f: current: name at least one shard"),
        ("current: a:1\n", "f: current: must be a list of up to 64 servers, each host:port"),
        ("current: [[a]]\n", "f: current: must be a list"),
        (f"current: [{','.join(f'a{n}' for n in range(65))}]\n", "f: current: must be a list of up to 64"),
        ("current: [a, 'a:70000']\n", "f: current: the host or port can't be read"),
        ("current: ['/run/redis.sock:1']\n", "f: current: the host or port can't be read"),
        ("current: [a, 'a:6379']\n", "f: current: a host is listed twice"),
        ("current: [a]\nprevious: [b]\n", "f: until: write a time with its time zone"),
        ("current: [a]\nprevious: [b]\nuntil: 2026-01-31T12:00:00\n",
         "f: until: write a time with its time zone"),
        ("current: [a]\nprevious: [b]\nuntil: [2026-01-31T12:00:00Z]\n",
         "f: until: write a time with its time zone"),
        ("current: [a]\nprevious: {b: c}\n", "f: previous: must be a list"),
        ("current: [a\n", "f is not YAML, look at line"),
        ("- a\n", "f must hold keys and values"),
    ],
)  # fmt: skip
def test_read_shards_names_the_key_with_the_mistake(text, mistake):
    with pytest.raises(ValueError, match=mistake.replace("(", r"\(")):
        read_shards("f", text)


def test_unusable_file_keeps_the_previous_list(tier, tmp_path, caplog):
    path = tmp_path / "shards.yaml"
    file = ShardsFile(str(path), tier)

    def follow(text: str | None) -> tuple[str, str]:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        file.follow()
        file.follow()
        return str(tier.address), file.problem

    with caplog.at_level(logging.INFO):
        assert follow(None) == ("of-the-url:6379", f"{path} can't be read: no such file or directory")
        assert follow("current: [a, b]\n") == ("a:6379,b:6379", "")
        assert follow("current: []\n")[0] == "a:6379,b:6379"
        assert file.problem.startswith(f"{path}: current: name at least one shard")
        assert follow("current: [a, b]\n") == ("a:6379,b:6379", "")
        assert follow(None)[0] == "a:6379,b:6379"
        assert file.problem.endswith("no such file or directory")
        assert follow("current: [b]\ncurent: [c]\n") == ("b:6379", "")
    assert caplog.text.count("name at least one shard") == 1
    assert "The list of the remote tier's shards is still a:6379,b:6379" in caplog.text
    assert "'curent' is unknown, and ignored; did you mean 'current'?" in caplog.text
