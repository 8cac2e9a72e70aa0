"""The separator of documents with tokenizers of the usual kinds."""

from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmcache_client.vllm.blend.separator import Separator
from testing.engine.tiny_model import tiny_model

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen split text into words before they merge characters."""
SPECIAL = "<|separator|>"
MERGED = {"GPT-2": ["\n\n", " # # "], "Llama 3": ["\n\n", " # # ", "\n###\n", "###"]}
"""Separators that each kind of tokenizer merges with some of the text next to them."""


def config(tokenizer, **fields):
    """The fields of vLLM's ``ModelConfig`` from which it loads the tokenizer of a folder."""
    defaults = {
        "model": str(tokenizer),
        "tokenizer": str(tokenizer),
        "runner_type": "generate",
        "tokenizer_mode": "auto",
        "tokenizer_revision": None,
        "trust_remote_code": False,
        "skip_tokenizer_init": False,
    }
    return SimpleNamespace(**(defaults | fields))


@pytest.fixture(scope="module", params=["GPT-2", "Llama 3"])
def merging(request, tmp_path_factory):
    """A folder with a tokenizer that merges every text that its kind can merge."""
    splitter: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if request.param == "Llama 3":
        words = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splitter = pre_tokenizers.Sequence([words, bytes_of_words])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=[SPECIAL], show_progress=False
    )
    texts = ["word.\n\nword ###\n\nThe end.\n###\n12\n(a) # # #  (a) ###(", "word.\n" * 9, "\n\n", "\n\n "]
    tokenizer.train_from_iterator(texts * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return request.param, folder, tokenizer


def warnings_of(caplog):
    ours = (record for record in caplog.records if record.name.startswith("lmcache_client"))
    return [record.getMessage() for record in ours if record.levelname == "WARNING"]


def test_prompt_is_split_by_the_text_of_the_separator(caplog):
    separator = Separator.load("\n###\n", config(tiny_model()))
    texts = "A system prompt.", "First document.\n", "Second one: 2", "question"
    prompt = PreTrainedTokenizerFast.from_pretrained(tiny_model()).encode("\n###\n".join(texts))
    assert list(separator.places(prompt)) == [16, 37, 55]
    assert len(separator.tokens) == 5
    assert not warnings_of(caplog)


@pytest.mark.parametrize("text", [SPECIAL, " ###\n"])
def test_separators_of_the_remedy_work(merging, text, caplog):
    _, folder, tokenizer = merging
    separator = Separator.load(text, config(folder))
    assert list(separator.tokens) == tokenizer.encode(text).ids
    assert not warnings_of(caplog)


def test_separator_that_merges_with_documents_is_refused(merging, caplog):
    kind, folder, _ = merging
    for text in MERGED[kind]:
        caplog.clear()
        separator = Separator.load(text, config(folder))
        assert separator.tokens == ()
        assert "can't be used" in separator.obstacle
        (warning,) = warnings_of(caplog)
        assert f"separator ({text!r}): the tokenizer merges it with text next to it, as in" in warning
        assert "set it to a special token of the model, or to text that begins with a blank" in warning


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"skip_tokenizer_init": True}, "vLLM has no tokenizer; start it without --skip-tokenizer-init."),
        ({"tokenizer_mode": "strange"}, "No tokenizer registered for tokenizer_mode='strange'."),
    ],
    ids=["skipped", "fails to load"],
)
def test_engine_without_tokenizer_answers_exactly(tmp_path, fields, reason, caplog):
    assert Separator.load("###", config(tmp_path, **fields)).tokens == ()
    (warning,) = warnings_of(caplog)
    assert f"({'###'!r}): {reason}" in warning


def test_no_tokenizer_is_loaded_without_a_separator(caplog):
    assert Separator.load("", None) == Separator()
    assert not warnings_of(caplog)
