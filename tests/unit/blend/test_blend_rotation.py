import pytest
import torch

from lmcache_client.blend.rotation import Angles, Rotation

NUM_POSITIONS, NUM_HEADS, HEAD_SIZE = 4000, 3, 16


def table(rotary_dim: int = HEAD_SIZE, factor: float = 1.0, dtype=torch.float32) -> torch.Tensor:
    """Cosines and sines as vLLM's rotary embeddings have them; YaRN multiplies them by a factor."""
    pairs = rotary_dim // 2
    frequencies = 10000 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(NUM_POSITIONS)[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), -1) * factor).to(dtype)


def rotated(raw: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """K at its positions, by complex numbers in float64."""
    pairs = table.shape[1] // 2
    entries = torch.complex(table[positions, :pairs].double(), table[positions, pairs:].double())[:, None]
    k = raw.double().clone()
    part = k[..., : 2 * pairs]
    first, second = (part[..., :pairs], part[..., pairs:]) if is_neox else (part[..., ::2], part[..., 1::2])
    product = torch.complex(first, second) * entries
    first[:], second[:] = product.real, product.imag
    return k


def random(num_tokens: int, head_size: int = HEAD_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, NUM_HEADS, head_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("rotary_dim", "factor", "dtype"),
    [
        (HEAD_SIZE, 1.0, torch.float32),
        (HEAD_SIZE // 2, 1.0, torch.float32),  # the second half of each head is not rotated
        (HEAD_SIZE, 1.37, torch.float32),  # YaRN
        (HEAD_SIZE, 1.37, torch.bfloat16),  # vLLM rounds the table to the model's type
    ],
)
def test_k_is_as_if_computed_at_its_new_positions(is_neox, rotary_dim, factor, dtype):
    entries = table(rotary_dim, factor, dtype)
    raw, generator = random(500), torch.Generator().manual_seed(1)
    old, new = (
        torch.randint(NUM_POSITIONS, (500,), generator=generator) for _ in range(2)
    )  # both directions
    k = rotated(raw, old, entries, is_neox).float()
    Rotation.from_table(entries, rotary_dim, is_neox).angles(old, new).rotate(k)
    assert (k - rotated(raw, new, entries, is_neox)).abs().max() < 2e-5
    assert torch.equal(k[..., rotary_dim:], raw[..., rotary_dim:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_k_in_half_precision_is_rounded_once(dtype):
    entries, old, new = table(), torch.arange(300), torch.arange(300) + 3500
    k = rotated(random(300), old, entries, True).to(dtype)
    exact = k.double()
    angles = Rotation.from_table(entries, HEAD_SIZE, True).angles(old, new)
    angles.rotate(exact)
    angles.rotate(k)
    assert torch.allclose(k.double(), exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-6)


def test_k_that_stays_in_its_place_does_not_change():
    places, k = torch.arange(NUM_POSITIONS), random(NUM_POSITIONS)
    before = k.clone()
    Rotation.from_table(table(factor=1.37, dtype=torch.bfloat16), HEAD_SIZE, True).angles(
        places, places
    ).rotate(k)
    assert torch.equal(k, before)


def test_pieces_and_strides_change_nothing():
    """Large K is rotated in pieces, and K of a paged cache is not contiguous."""
    angles = Rotation.from_table(table(), HEAD_SIZE, True).angles(
        torch.arange(3000), torch.arange(3000) + 700
    )
    k = random(3000)
    parts = k.transpose(0, 1).contiguous().transpose(0, 1)
    for start in range(0, 3000, 10):
        Angles(angles.cos[start : start + 10], angles.sin[start : start + 10]).rotate(
            parts[start : start + 10]
        )
    angles.rotate(k)
    assert torch.equal(k, parts)


def test_no_tokens_and_a_nan_disturb_nothing():
    rotation = Rotation.from_table(table(), HEAD_SIZE, True)
    nothing = torch.empty(0, dtype=torch.long)
    rotation.angles(nothing, nothing).rotate(random(0))
    k, places = random(20), torch.arange(20)
    k[3, 1, 0] = torch.nan
    rotation.angles(places, places + 9).rotate(k)
    assert k.isnan().any(-1).nonzero().tolist() == [[3, 1]]


def test_refuses_what_cannot_be_rotated():
    rotation, place = Rotation.from_table(table(), HEAD_SIZE, True), torch.tensor([5])
    for outside in (-1, NUM_POSITIONS):
        for old, new in ((place, torch.tensor([outside])), (torch.tensor([outside]), place)):
            with pytest.raises(
                ValueError, match=f"rotary table of 4000 lacks positions {outside} to {outside}"
            ):
                rotation.angles(old, new)
    with pytest.raises(ValueError, match=r"cannot rotate 8 pairs in K of torch\.float32 \[1, 3, 14\]"):
        rotation.angles(place, place).rotate(random(1, head_size=14))
    with pytest.raises(ValueError, match=r"K of torch\.uint8"):
        rotation.angles(place, place).rotate(torch.zeros(1, 3, HEAD_SIZE, dtype=torch.uint8))
    for entries in (table()[0], table(8), table().to(torch.complex64), table().int()):
        with pytest.raises(ValueError, match=r"not cosines and sines \[positions, 16\]"):
            Rotation.from_table(entries, HEAD_SIZE, True)
