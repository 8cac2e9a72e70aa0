"""Links between launchers: both sides prove the secret, and no line of another link or direction is valid."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.group import channel
from lmcache_client.group.channel import MAX_LINE_BYTES, Channel, LinkError, PartIdentity

SECRET = b"a secret of the group"
PART = PartIdentity(1, 2, "r1", "pod-1")
GREETING = channel.greeting("pod-0", "nonce-a")
HELLO = channel.hello(PART, "nonce-b")


def pair() -> tuple[Channel, Channel]:
    lines = GREETING + HELLO
    return Channel(SECRET, lines, is_leader=True), Channel(SECRET, lines, is_leader=False)


def test_messages_arrive_in_both_directions() -> None:
    leader, follower = pair()
    for text in ("welcome", "beat", "end part 1 of 2 (pod-1) ended: vLLM exited with 1"):
        assert follower.open(leader.seal(text)) == text
        assert leader.open(follower.seal(text)) == text


def test_a_message_is_one_short_printable_line() -> None:
    leader, follower = pair()
    line = leader.seal("end \n\0\x1b[2J ü" + 2000 * "x")
    assert len(line) < MAX_LINE_BYTES
    assert line.count(b"\n") == 1
    assert follower.open(line).startswith("end ???[2J ?xxx")


@pytest.mark.parametrize(
    "other",
    [
        Channel(b"another secret of a group", GREETING + HELLO, is_leader=True),
        Channel(SECRET, channel.greeting("pod-0", "nonce-c") + HELLO, is_leader=True),
        Channel(SECRET, GREETING + channel.hello(PART, "nonce-c"), is_leader=True),
        *(
            Channel(SECRET, GREETING + channel.hello(part, "nonce-b"), is_leader=True)
            for part in (PART._replace(rank=2), PART._replace(nodes=3), PART._replace(revision="r2"))
        ),
        Channel(SECRET, GREETING + HELLO, is_leader=False),  # a stranger sends the follower's lines back
    ],
)
def test_a_line_is_valid_only_on_its_link(other: Channel) -> None:
    _, follower = pair()
    with pytest.raises(LinkError, match="did not prove that it knows the group's secret"):
        follower.open(other.seal("welcome"))


def test_lines_cannot_be_repeated_or_left_out() -> None:
    leader, follower = pair()
    first, second = leader.seal("beat"), leader.seal("beat")
    assert follower.open(first) == "beat"
    with pytest.raises(LinkError):
        follower.open(first)
    _, follower = pair()
    with pytest.raises(LinkError):
        follower.open(second)


def test_the_secret_is_never_sent() -> None:
    leader, _ = pair()
    assert SECRET not in GREETING + HELLO + leader.seal("welcome")


@given(line=st.binary(max_size=200), position=st.integers(0, 80), flipped=st.integers(1, 255))
def test_garbage_is_refused(line: bytes, position: int, flipped: int) -> None:
    leader, follower = pair()
    with pytest.raises(LinkError):
        follower.open(line + b"\n")
    _, follower = pair()
    damaged = bytearray(leader.seal("end part 1 of 2 ended"))
    damaged[position] ^= flipped
    with pytest.raises(LinkError):
        follower.open(bytes(damaged))


@given(line=st.binary(max_size=200))
def test_first_lines_are_parsed_or_refused(line: bytes) -> None:
    for parse in (channel.read_greeting, channel.read_hello):
        with contextlib.suppress(LinkError):
            assert parse(line)


def test_first_lines_name_the_part() -> None:
    assert channel.read_hello(HELLO) == PART
    assert channel.read_greeting(GREETING) == "pod-0"
    with pytest.raises(LinkError, match="all pods of a group need the same release"):
        channel.read_greeting(GREETING.replace(b"/1", b"/2"))
