"""Blending on a GPU, with segments stored on the host or on the GPU. Needs a GPU: `make gpu-check`."""

import pytest
import torch

from lmcache.blend.selection import AllTokens, FirstTokens, LargestDeviation, MostAttended, NoTokens
from lmcache.huggingface import BlendedModel
from testing.blend.tiny import engine_for, random_tokens, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
FIXED = [NoTokens(), FirstTokens(0.3)]
PROMPT = [*random_tokens(40, 33, 50), *random_tokens(9, seed=1)]


def prefilled(model, device, selection) -> list[torch.Tensor]:
    """The question's logits of two prefills: the first computes the documents, the second finds them."""
    with (
        engine_for(model, local_device=device) as engine,
        BlendedModel(model, engine, selection=selection) as blended,
    ):
        logits = [blended.prefill([PROMPT], 9)[0].logits for _ in range(2)]
        assert blended.segments.hit_tokens_count == 40 + 33 + 50
        return logits


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recomputing_everything_equals_a_full_prefill(device):
    model = tiny_model("llama").cuda()
    with torch.no_grad():
        expected = model(torch.cat(PROMPT)[None].cuda()).logits[0, -9:]
    for logits in prefilled(model, device, AllTokens()):  # of another number of rows, so kernels may differ
        assert (logits - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("selection", "dtype"),
    [
        *((selection, dtype) for selection in FIXED for dtype in (torch.float32, torch.bfloat16)),
        *((selection, torch.float32) for selection in (LargestDeviation(0.3), MostAttended(0.3))),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, torch.dtype) else str(value),
)
def test_gpu_blends_like_the_processor(device, dtype, selection):
    """Selections by values may choose other tokens in bfloat16, whose rounding differs between kernels."""
    expected = prefilled(tiny_model("llama").to(dtype), "cpu", selection)[0].float()
    for logits in prefilled(tiny_model("llama").to("cuda", dtype), device, selection):
        assert logits.is_cuda
        logits = logits.float().cpu()
        assert (logits - expected).norm() <= (1e-3 if dtype == torch.float32 else 0.1) * expected.norm()
