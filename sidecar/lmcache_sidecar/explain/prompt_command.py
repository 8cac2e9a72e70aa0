"""``lmcache-sidecar explain --prompt``: where the chunks of one prompt are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lmcache.explain import prompt as names
from lmcache.explain.prompt import Engine, PromptPlaces
from lmcache_sidecar.explain import prompts
from lmcache_sidecar.explain.asking import ExplainError, ask

_PAGE = "/prompt"


def explain(arguments: argparse.Namespace) -> PromptPlaces:
    """Return where the chunks of the prompt are. Raises ExplainError, or LookupError for a strange answer."""
    prompt = prompts.read(arguments.prompt)
    if prompt.lora_name:
        raise ExplainError(
            "chunks of an adapter can't be named outside the engine, because their keys cover the adapter's "
            "files: use --request-id for a request with an adapter"
        )
    engine = _choose(_engines(arguments.url), arguments.model)
    _check_hashes(engine)
    tokens = prompts.token_ids(prompt, arguments.engine_url, arguments.tokenizer, engine.model)
    if not engine.num_chunks(len(tokens)):
        return PromptPlaces(len(tokens), 0, 0, 0, (names.Run(0, len(tokens), "nowhere", "tail"),))
    try:
        named = names.chunk_keys(engine, tokens, prompt.cache_salt)
    except ValueError as error:
        raise ExplainError(f"the prompt is not one of this engine: {error}") from error
    answers = [ask(arguments.url, _PAGE, question) for question in names.questions(engine, named)]
    return names.join(engine, len(tokens), answers)


def _engines(url: str) -> Sequence[Engine]:
    answer: Any = ask(url, _PAGE, {})
    if answer["version"] != names.VERSION:
        raise ExplainError(
            f"the sidecar at {url} has another version of {_PAGE}: use the command of its own image"
        )
    engines = {engine.namespace: engine for engine in map(Engine.of, answer["engines"])}
    return list(engines.values())


def _choose(engines: Sequence[Engine], model: str | None) -> Engine:
    """Return the only engine, or the one that serves ``model``."""
    chosen = [engine for engine in engines if model in (None, engine.model)]
    if len(chosen) == 1:
        return chosen[0]
    if not engines:
        raise ExplainError("no engine is attached to the sidecar: start the engine, and ask again")
    models = ", ".join(sorted(repr(engine.model) for engine in engines))
    if chosen:
        raise ExplainError(f"several engines are attached, with the models {models}: choose one with --model")
    raise ExplainError(f"no engine with the model {model!r} is attached: the models are {models}")


def _check_hashes(engine: Engine) -> None:
    if engine.root:
        return
    if not engine.algorithm:
        raise ExplainError(
            "the engine's LMCache does not say how it hashes prompts: upgrade it to the sidecar's version"
        )
    reason = engine.private_reason or f"block hashes by {engine.algorithm} can't be reproduced"
    raise ExplainError(f"the chunks of a prompt can't be named outside the engine: {reason}")
