"""Removal of secrets from the files of ``kubectl lmcache report``."""

import json
import time
from typing import Any

import pytest

from lmcache_operator.specs.redaction import REMOVED, Redactor

SECRET = "hunter2-Zq8vXw"


def redacted(value: Any) -> Any:
    return Redactor().value(value)


@pytest.mark.parametrize(
    "name",
    ["PASSWORD", "REDIS_PASSWORD", "HF_TOKEN", "apiKey", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY",
     "clientSecret", "accessToken", "x-api-key", "DB_PASS", "REGISTRY_AUTH", "SIGNING_KEY",
     "passphrase", "Authorization"],
)  # fmt: skip
def test_values_with_the_name_of_a_secret_are_removed(name: str) -> None:
    assert redacted({"env": [{"name": name, "value": SECRET}]}) == {"env": [{"name": name, "value": REMOVED}]}
    assert redacted({name: SECRET}) == {name: REMOVED}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOME", "/root"), ("MAX_TOKENS", "512"), ("TOKENIZERS_PARALLELISM", "false"), ("TOKENIZER", "Qwen"),
        ("TOKEN_FILE", "/run/token"), ("secretName", "demo-remote"), ("PASSWORD", ""), ("KEY_PATH", "/tls"),
        ("key", "tls.crt"), ("topologyKey", "zone"), ("author", "me"), ("maxTokens", 5), ("hasToken", True),
    ],
)  # fmt: skip
def test_other_values_stay(name: str, value: Any) -> None:
    assert redacted([{"name": name, "value": value}, {name: value}]) == [
        {"name": name, "value": value},
        {name: value},
    ]


def test_references_to_secrets_stay() -> None:
    source = {"secretKeyRef": {"name": "demo-remote", "key": "password"}}
    variable = {"name": "REDIS_PASSWORD", "valueFrom": source}
    volume = {"name": "tls", "secret": {"secretName": "demo-tls"}}
    assert redacted({"env": [variable], "volumes": [volume]}) == {"env": [variable], "volumes": [volume]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", SECRET],
        ["--api-key", SECRET, "other-" + SECRET],
        [f"--api-key={SECRET}"],
        [f"--admin-auth={SECRET}"],
        [f"--api-key {SECRET}"],
        [f"--url redis://:{SECRET}@redis --size=1"],
        ["sh", "-c", f"exec valkey-server --requirepass-token {SECRET} --port 6379"],
        ["sh", "-c", f"PASSWORD={SECRET} exec engine"],
        [f"redis://user:{SECRET}@redis:6379"],
        [f"redis://:{SECRET}@redis:6379/0"],
        ["-H", f"Authorization: Bearer {SECRET}"],
    ],
)
def test_secrets_of_command_lines_are_removed(arguments: list[str]) -> None:
    shown = redacted({"args": ["--port", "8000", *arguments, "--model", "Qwen/Qwen3-8B"]})["args"]
    assert SECRET not in str(shown)
    assert REMOVED in str(shown)
    assert (shown[:2], shown[-2:]) == (["--port", "8000"], ["--model", "Qwen/Qwen3-8B"])


@pytest.mark.parametrize(
    "line",
    [
        f"non-default args: {{'api_key': ['{SECRET}'], 'port': 8000}}",
        json.dumps({"password": SECRET, "port": 8000}),
        json.dumps(json.dumps({"password": SECRET, "port": 8000})),
        f"token={SECRET}, port 8000",
        f"connecting to rediss://lmcache:{SECRET}@redis.cache:6379, port 8000",
        f"GET /v1/models Authorization: Bearer {SECRET} port 8000",
    ],
)
def test_secrets_of_logs_are_removed(line: str) -> None:
    shown = Redactor().text(line)
    assert SECRET not in shown
    assert "8000" in shown


@pytest.mark.parametrize("prefix", ["hf_", "sk-", "ghp_", "AKIA", "eyJhbGciOiJSUzI1NiJ9."])
def test_values_that_look_like_tokens_are_removed(prefix: str) -> None:
    token = f"{prefix}abcdefghijklmnop0123"
    assert redacted({"name": "MODEL", "value": token}) == {"name": "MODEL", "value": REMOVED}
    assert (
        Redactor().text(f"use {token}, disk-0123456789abcdef0123")
        == f"use {REMOVED}, disk-0123456789abcdef0123"
    )


def test_private_keys_are_removed() -> None:
    pem = f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----\nrest"
    for shown in (Redactor().text(pem), str(redacted({"data": {"tls.crt": pem, "tls.key": pem}}))):
        assert SECRET not in shown
        assert "rest" in shown


def test_secret_lists_are_removed() -> None:
    assert redacted({"apiKeys": [SECRET, SECRET], "ports": ["a"]}) == {
        "apiKeys": [REMOVED] * 2,
        "ports": ["a"],
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("S3_SECRET_KEY=abc", f"S3_SECRET_KEY={REMOVED}"),
        ("redis://:p@ss@kv:6379", f"redis://:{REMOVED}@kv:6379"),
        ("postgres://u:ab/cd@db/x", f"postgres://u:{REMOVED}@db/x"),
        ("password='a b c' next", f"password='{REMOVED}' next"),
        ("--requirepass x --port 1", f"--requirepass {REMOVED} --port 1"),
        ("http://kv:80/x, max_tokens=7", "http://kv:80/x, max_tokens=7"),
    ],
)
def test_whole_secrets_are_removed_from_texts(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_secret_of_an_object_is_removed_from_later_texts() -> None:
    redactor = Redactor()
    redactor.value({"env": [{"name": "HF_TOKEN", "value": SECRET}, {"name": "DB_PASSWORD", "value": "abc"}]})
    assert redactor.text(f"downloads with {SECRET} of abc") == f"downloads with {REMOVED} of abc"


def test_copies_of_the_object_are_left_out() -> None:
    applied = {"kubectl.kubernetes.io/last-applied-configuration": SECRET, "lmcache.io/a": "b"}
    metadata = {"name": "demo", "annotations": applied, "managedFields": [{"f:value": SECRET}]}
    assert redacted({"metadata": metadata}) == {
        "metadata": {"name": "demo", "annotations": {"lmcache.io/a": "b"}}
    }


@pytest.mark.parametrize(
    "text", ["-" * 300_000, "token " * 50_000, "token" + " " * 300_000, "a://" * 50_000, '"' * 300_000]
)
def test_hostile_logs_take_little_time(text: str) -> None:
    began = time.process_time()
    Redactor().text(text)
    assert time.process_time() - began < 5
