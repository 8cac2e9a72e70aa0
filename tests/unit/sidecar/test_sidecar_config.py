"""Configuration of the sidecar: sources and their order, and a clear line for each mistake."""

import re
from dataclasses import replace

import pytest

from lmcache_sidecar.command import main
from lmcache_sidecar.config import Config, ConfigError, read, suspect_variables
from lmcache_store.common.options import readers_of
from lmcache_store.common.units import parse_size
from lmcache_store.tiers.remote.address import Address


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sidecar.yaml"


def load(arguments: dict[str, str], environ: dict[str, str]) -> Config:
    return read(arguments, environ).usable()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("512Ki", 512 << 10),
        ("512Mi", 512 << 20),
        ("4Gi", 4 << 30),
        ("1.5Gi", 3 << 29),
        ("2Ti", 2 << 40),
        ("3k", 3000),
        ("2G", 2 * 10**9),
    ],
)
def test_parse_size_returns_bytes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "4Gb", "4GiB", "-1", "Gi", "4 Gi", "1e9", "0x10", "nan", "٣Gi"])
def test_parse_size_refuses_invalid_text(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_optional_values_are_parsed():
    longest = "/" + "s" * 106
    config = load({"numa_node": "0", "huge_pages": "true", "socket": longest}, {})
    assert (config.numa_node, config.huge_pages, config.socket) == (0, True, longest)
    assert load({"numa_node": ""}, {}).numa_node is None


def test_flag_beats_environment_beats_file_beats_default(path):
    path.write_text("memory_size: 1Mi\nhttp_port: 1111\nlog_level: debug\n")
    environ = {"LMCACHE_MEMORY_SIZE": "2Mi", "LMCACHE_HTTP_PORT": "2222", "LMCACHE_CONFIG": str(path)}
    config = load({"memory_size": "3Mi"}, environ)
    assert (config.memory_size, config.http_port, config.log_level) == (3 << 20, 2222, "debug")
    assert config.log_format == "text"


def test_empty_file_is_no_mistake(path):
    path.write_text("# nothing\n")
    assert load({"config": str(path)}, {}) == load({}, {}) == Config()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("memory_size: [1]", "memory_size: this must be a single value"),
        ("memory_size: {a: 1}", "memory_size: this must be a single value"),
        ("peer_bandwidth: 1Mi", "peer_bandwidth: '1Mi' is below 16Mi"),
        ("memory_retain_percent: 101", "memory_retain_percent: '101' is not a percentage from 0 to 100"),
        ("memory_max_ttl_seconds: 0", "memory_max_ttl_seconds: '0' is not a number of seconds from 1 to"),
        ("memory_max_ttl_seconds: 1.5", "memory_max_ttl_seconds: '1.5' is not a number of seconds"),
        ("memory_size:", "memory_size: '' is not a size"),
        ("memory_size: 4Gb", r"sidecar.yaml: memory_size: '4Gb' is not a size"),
        ("- a", "must hold keys and values"),
        ("a: [", "is not YAML, look at line 1"),
        ("\0", "is not YAML"),
        ("[" * 10_000, "is not YAML"),
    ],
)
def test_mistake_in_the_file_is_named_in_a_line(path, content, sentence):
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load({"config": str(path)}, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("memory_sise: 1Gi", "key 'memory_sise' is unknown, and ignored; did you mean 'memory_size'?"),
        ("memory-size: 1Gi", "key 'memory-size' is unknown, and ignored; did you mean 'memory_size'?"),
        ("1: [2]", "key '1' is unknown, and ignored"),
        ("redis://:S3cr3t@host: 1", "a key with characters other than letters, digits, _ and - is ignored"),
    ],
)
def test_unknown_keys_of_a_newer_operator_are_ignored(path, content, sentence):
    path.write_text(f"{content}\nhttp_port: 1111\n")
    assert load({"config": str(path)}, {}).http_port == 1111
    assert read({"config": str(path)}, {}).warnings == (f"{path}: {sentence}",)


def test_values_in_the_file_are_read_as_written(path):
    path.write_text("huge_pages: true\nhttp_port: '1111'\nnuma_node: 0\ndisk_path: 2020-01-01\n")
    config = load({"config": str(path)}, {})
    assert (config.huge_pages, config.http_port, config.numa_node) == (True, 1111, 0)
    assert config.disk_path == "2020-01-01"


def test_all_mistakes_are_reported_together():
    reading = read({"memory_size": "big", "http_port": "x"}, {"LMCACHE_STAY_UP": "true"})
    assert [mistake.partition(":")[0] for mistake in reading.mistakes] == ["--memory-size", "--http-port"]
    assert reading.config == Config(stay_up=True)


SECRET = "S3cr3t"
NO_PORTS = ["", "-1", "65536", "1_0", " 3 ", "+5", "٣", "0x10", "80.0", "70000", "x"]


@pytest.mark.parametrize(
    "content",
    [
        f"remote_url: redis://:{SECRET}@h:6379\n  db: 1",
        f"remote_url: 'redis://:{SECRET}@h",
        f'remote_url: "redis://:\\{SECRET}@h"',
        f"remote_url: *{SECRET}",
        f"remote_url: !{SECRET} x",
        f"remote_url: &{SECRET}",
        f"remote_url: %{SECRET}",
        f"remote_url: @{SECRET}",
        f"remote_url: [redis://:{SECRET}@h",
        f"remote_url: {{redis://:{SECRET}@h}}",
        f"remote_url: redis://:{SECRET}@h: x",
        f"remote_url redis://:{SECRET}@h",
        f"remote_url redis://:{SECRET}@h\nhttp_port: 1",
        f"remote_url=redis://:{SECRET}@h: 1",
        f"remote_url: redis://:{SECRET}@h:99999",
        f"remote_url: redis://:{SECRET}/@h",
        f"remote_url: redis://:a?{SECRET}@h",
        f"remote_url: redis://user:{SECRET}",
        f"remote_url: http://:{SECRET}@h",
        f"remote_url: rediss://:{SECRET}@h?verify=maybe",
        f"remote_url:\n\tredis://:{SECRET}@h",
        f"? remote_url\n: - {SECRET}",
        f"---\nremote_url: redis://:{SECRET}@h\n---\n",
        f"remote_url: redis://:{SECRET}@h\n\x01",
    ],
)
def test_mistakes_do_not_repeat_secrets_of_the_file(path, content):
    path.write_text(content)
    reading = read({"config": str(path)}, {})
    messages = " ".join(reading.mistakes + reading.warnings)
    assert SECRET not in messages
    assert messages or content.endswith(f"&{SECRET}")


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        ({"memory_size": "big"}, {}, "--memory-size: 'big' is not a size"),
        ({}, {"LMCACHE_MEMORY_SIZE": "big"}, "LMCACHE_MEMORY_SIZE: 'big' is not a size"),
        *(({"http_port": port}, {}, f"--http-port: '{port}' is not a port") for port in NO_PORTS),
        ({"drain_grace_seconds": "-1"}, {}, "--drain-grace-seconds: '-1' is not a number of seconds"),
        ({"drain_grace_seconds": "nan"}, {}, "is not a number of seconds"),
        ({"remote_timeout_seconds": "0"}, {}, "'0' is not a number of seconds from 0.01 to 60"),
        ({"huge_pages": "yes"}, {}, "--huge-pages: 'yes' is not true or false"),
        ({"numa_node": "-1"}, {}, "--numa-node: '-1' is not a NUMA node"),
        ({"admit": "Some"}, {}, "--admit: 'Some' is not one of All, OnReuse"),
        ({"log_format": "xml"}, {}, "'xml' is not one of text, json"),
        ({"log_level": "loud"}, {}, "'loud' is not one of debug"),
        ({"socket": "/" + "s" * 107}, {}, "has 108 bytes, the system takes at most 107"),
        ({"remote_url": "http://host"}, {},
         "--remote-url: remote URL: scheme 'http' is not one of redis, unix"),
        ({"remote_password_file": "/x"}, {}, "--remote-password-file need --remote-url"),
        ({"remote_shards_file": "/x"}, {}, "--remote-shards-file needs --remote-url with redis://"),
        ({"remote_shards_file": "/x", "remote_url": "redis-cluster://host"}, {},
         "--remote-shards-file needs --remote-url with redis://"),
        ({"config": "/nowhere/x.yaml"}, {}, "/nowhere/x.yaml can't be read: no such file"),
    ],
)  # fmt: skip
def test_mistakes_name_their_source(arguments, environ, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(arguments, environ)


def test_credentials_are_read_from_files_each_time(tmp_path):
    (tmp_path / "user").write_text("k/v\n")
    (tmp_path / "password").write_text("p@ss:/\n")
    address = Address.parse("redis://somebody:else@host/3")
    config = Config(
        remote_url=address,
        remote_username_file=str(tmp_path / "user"),
        remote_password_file=str(tmp_path / "password"),
    )
    assert config.with_credentials(address) == replace(address, username="k/v", password="p@ss:/")
    (tmp_path / "password").write_text("rotated")
    assert config.with_credentials(address).password == "rotated"
    assert Config(remote_url=address).with_credentials(address) == address
    assert "rotated" not in repr(config.with_credentials(address))


def test_missing_secret_file_is_named():
    with pytest.raises(ConfigError, match=r"--remote-password-file: /nowhere can't be read: no such file"):
        Config(remote_password_file="/nowhere").with_credentials(Address.parse("redis://host"))


def test_mistyped_variables_are_reported_and_service_variables_are_not():
    environ = {
        "LMCACHE_MEMORY_SISE": "1Gi",
        "LMCACHE_OPERATOR_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_MEMORY_SIZE": "1Gi",
        "HOME": "/",
    }
    assert list(suspect_variables(environ)) == [
        "environment variable LMCACHE_MEMORY_SISE is unknown; did you mean LMCACHE_MEMORY_SIZE?"
    ]


def test_help_names_every_option_and_its_variable(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in readers_of(Config):
        assert f"--{name.replace('_', '-')} " in text
        assert f"[LMCACHE_{name.upper()}]" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory-size", "big"], "--memory-size: 'big' is not a size"),
        (["--socket", "/nowhere/x.sock"], "--socket: /nowhere is not a directory"),
        (["--arena", "/nowhere/arena"], "--arena: /nowhere is not a directory"),
        (["--memory-size", "900Ti"], "need"),
        (["--memory-sise=S3cr3t"], "argument --memory-sise is unknown; did you mean '--memory-size'?"),
        (["--remote-url:redis://:S3cr3t@h"], "argument --remote-url is unknown"),
        (["--remote-passwd", "S3cr3t"], "argument --remote-passwd is unknown; did you mean"),
        (["--log-level", "info", "S3cr3t"], "too many arguments"),
        (["--memory-size"], "expected one argument"),
    ],
)
def test_mistake_prints_a_line_and_exits_with_2(capsys, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.delenv("LMCACHE_CONFIG", raising=False)
    assert main(["serve", "--socket", str(tmp_path / "s"), "--arena", str(tmp_path / "a"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lmcache-sidecar: error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert "S3cr3t" not in error
