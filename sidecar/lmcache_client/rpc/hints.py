"""KV hints as messages, and the answers that the sidecar keeps for programs that are not attached to it."""

from __future__ import annotations

from typing import Any, Self

import grpc

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.errors import RpcRefusedError, SidecarUnavailableError
from lmcache_store.common.timing import TIMING
from lmcache_store.hints import HintAction, HintDecision, HintOutcome, Hints

_OUTCOMES = {int(pb.HintOutcome.Value(f"HINT_{outcome.name}")): outcome for outcome in HintOutcome}
_NUMBERS = {outcome: number for number, outcome in _OUTCOMES.items()}
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


def hint_fields(hints: Hints) -> dict[str, Any]:
    """Return the fields of an ApplyHintsRequest that describe the hints."""
    return {
        "message_id": hints.message_id,
        "actions": list(map(_action_message, hints.actions)),
        "refusals": list(map(decision_message, hints.refusals)),
    }


def parse_decisions(reply: pb.ApplyHintsReply) -> list[HintDecision]:
    """Return the decisions in a reply. An outcome that this version does not know counts as deferred."""
    return [
        HintDecision(
            decision.action_id,
            _OUTCOMES.get(decision.outcome, HintOutcome.DEFERRED),
            decision.reason,
            decision.num_tokens,
            decision.ttl_seconds,
        )
        for decision in reply.decisions
    ]


class AnswerReader:
    """Reads kept answers from a sidecar's socket, without attaching. A context manager; not thread-safe."""

    def __init__(self, socket_path: str) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)
        self._call = self._channel.unary_unary(
            service.READ_HINTS.path,
            request_serializer=pb.ReadHintsRequest.SerializeToString,
            response_deserializer=pb.ApplyHintsReply.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def read(self, answer_id: str, timeout: float | None = None) -> list[HintDecision] | None:
        """Return the decisions about all actions; None: there is no answer yet.

        ``timeout``: deadline in seconds; None: ``TIMING.call_seconds``. Raises RpcRefusedError or
        SidecarUnavailableError.
        """
        try:
            request = pb.ReadHintsRequest(answer_id=answer_id)
            reply = self._call(request, timeout=TIMING.call_seconds if timeout is None else timeout)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.NOT_FOUND:
                return None
            if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
                raise RpcRefusedError(code, details) from error
            raise SidecarUnavailableError(f"{code.name}: {details}") from error
        return parse_decisions(reply)


def _action_message(action: HintAction) -> pb.HintAction:
    return pb.HintAction(**action._asdict() | {"kind": pb.HintKind.Value(action.kind.name)})


def decision_message(decision: HintDecision) -> pb.HintDecision:
    """Return a decision as a message."""
    fields = {"outcome": _NUMBERS[decision.outcome], "reason": service.shortened(decision.reason)}
    return pb.HintDecision(**decision._asdict() | fields)
