"""Refusals of `lmcache-operator inject` and of the chart's admission policy have the same texts."""

import re
from pathlib import Path

import pytest
from lmcache_operator.errors import InvalidSpecError

from tests.harness.operator_injection import injected, refused_pods

POLICY = Path(__file__).resolve().parents[3] / "charts/lmcache-operator/templates/injection.yaml"
_LITERAL = r"'(?:[^'\\]|\\.)*'"
_VALUE = r"variables\.[^+?]*?"
_ANY_ARGS = ".args: {}"
"""The policy and the command both read the rest of this message in the profile."""


def messages_of_policy() -> list[str]:
    """Messages of the CEL expressions `problemOfPod` and `problemOfEngine`, with `{}` for each variable."""
    text = POLICY.read_text()
    text = text[text.index("- name: problemOfPod") : text.index("- name: problem\n")]
    messages, end = [], 0
    for literal in re.finditer(_LITERAL, text):
        before, literal_text = text[end : literal.start()].strip(), literal[0][1:-1].replace("\\'", "'")
        if joined := re.fullmatch(rf"\+\s*(?:({_VALUE})\s*\+)?", before, re.DOTALL):
            messages[-1] += ("{}" if joined[1] else "") + literal_text
        elif re.search(r"[?:]$", before):
            messages.append(literal_text)
        end = literal.end()
    complete = [message for message in messages if ": " in message]
    return [message + "{}" if message.endswith(": ") else message for message in complete]


def messages_of_command() -> list[str]:
    messages = []
    for pod, _, _ in refused_pods():
        with pytest.raises(InvalidSpecError) as caught:
            injected(pod)
        messages.append(str(caught.value).removeprefix("Pod llm: ").removeprefix("spec.containers[0]."))
    return messages


def pattern(message: str) -> str:
    value = ".+" if message == _ANY_ARGS else "[^ ]+"
    return value.join(map(re.escape, message.removeprefix(".").split("{}")))


def test_policy_messages_are_distinct_and_name_a_field() -> None:
    messages = messages_of_policy()
    assert len(messages) == len(set(messages)) == 14
    assert all(re.match(r"(spec[\w.]*|\.\w+): .", message) for message in messages)


@pytest.mark.parametrize("message", [message for message in messages_of_policy() if message != _ANY_ARGS])
def test_command_has_every_message_of_the_policy(message: str) -> None:
    assert any(re.fullmatch(pattern(message), candidate) for candidate in messages_of_command())


def test_policy_has_every_message_of_the_command() -> None:
    patterns = list(map(pattern, messages_of_policy()))
    for message in messages_of_command():
        assert any(re.fullmatch(policy_pattern, message) for policy_pattern in patterns), message
