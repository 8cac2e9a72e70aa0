"""A request as an ASGI application gets it."""

from lmcache_client.vllm.asgi import Message, Receive


def receiving(*parts: bytes) -> Receive:
    """The messages of a body in these parts, and then of a client that has gone."""
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return receive
