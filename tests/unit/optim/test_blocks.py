"""Numbers kept in 8 bits."""

from __future__ import annotations

import math

import pytest
import torch

from danlu.optim.blocks import columns, decode, encode, table


def there_and_back(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scales = torch.empty(values.shape[0], columns(values.shape[1]), dtype=values.dtype)
    encode(values, codes, scales, signed=signed)
    return decode(codes, scales, signed=signed)


@pytest.mark.parametrize("signed", [True, False])
def test_the_tables_have_256_numbers_finest_near_zero(signed: bool) -> None:
    known = torch.tensor(table(signed=signed), dtype=torch.float64)
    assert len(known) == 256 and known.diff().min() > 0 and known.max() == 1 and 0 in known
    assert known.min() == (-0.99296875 if signed else 0)  # the middle of the highest of 64 cells of [0.1, 1]
    assert known[known > 0].min() == pytest.approx(5.5e-7 if signed else 3.25e-7)


@pytest.mark.parametrize("length", [1, 7, 256, 257, 384, 1000, 1001])
@pytest.mark.parametrize("signed", [True, False])
def test_every_number_comes_back_near(length: int, signed: bool) -> None:
    """Within half a cell: the first decade has 64 (signed) or 128, each lower one half as many, on a tenth."""
    values = torch.randn(5, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    values = values if signed else values.square()
    values[2] = 0
    back = there_and_back(values, signed=signed)
    assert back[2].eq(0).all()
    each = math.ceil(length / columns(length))
    for start in range(0, length, each):
        block, made = values[:, start : start + each], back[:, start : start + each]
        scale = block.abs().amax(1, keepdim=True).clamp(min=1e-300)
        decade = (block.abs() / scale).clamp(min=1e-7).log10().neg().floor().clamp(0, 6)
        half = 0.45 / (64 if signed else 128) * 0.2**decade
        assert ((made - block).abs() <= (half + 3.3e-7) * scale).all()  # 3.25e-7: the smallest above zero


def test_a_block_does_not_see_its_neighbours() -> None:
    values = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    louder = values.clone()
    louder[0, 5] = 1e6  # in the first of three blocks of 200
    louder[2] *= 1e3
    one, other = there_and_back(values, signed=True), there_and_back(louder, signed=True)
    assert torch.equal(one[0, 200:], other[0, 200:]) and torch.equal(one[1], other[1])
    assert not torch.equal(one[0, :200], other[0, :200])


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    values = torch.tensor([[1.0, 1e-9, 0.0, 2e-7]])
    back = there_and_back(values, signed=False)
    assert back[0, 0] == 1 and back[0, 2] == 0
    torch.testing.assert_close(back[0, [1, 3]], torch.tensor([3.25e-7, 3.25e-7]))
    assert there_and_back(values, signed=True)[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_each_number_has_the_nearest_code(signed: bool, dtype: torch.dtype) -> None:
    """Also those that stand just beside the middle between two codes, where the search is by halves of their bits."""
    known = torch.tensor(table(signed=signed), dtype=torch.float64)
    middles = ((known[1:] + known[:-1]) / 2).to(dtype)
    step = torch.finfo(dtype).eps
    beside = torch.cat([middles * (1 + n * step) for n in (-3, -2, -1, 1, 2, 3)] + [known.to(dtype)])
    source = torch.Generator().manual_seed(2)
    drawn = torch.randn(100_000, generator=source, dtype=dtype) * 10 ** (-8 * torch.rand(100_000, generator=source))
    values = torch.cat([beside, drawn.clamp(-1, 1) if signed else drawn.abs().clamp(max=1)])
    values = values[values.abs() > 4e-7] if not signed else values
    values = values[: values.numel() // 255 * 255].view(-1, 255)
    values = torch.cat([torch.ones(len(values), 1, dtype=dtype), values], 1)  # each block's scale is 1
    codes = torch.empty(values.shape, dtype=torch.uint8)
    encode(values, codes, torch.empty(len(values), 1, dtype=dtype), signed=signed)
    apart = (known[codes.long()] - values.double()).abs()
    low, high = (codes.long() - 1).clamp(min=0), (codes.long() + 1).clamp(max=255)
    # By more than rounding: an edge itself is rounded to the numbers' dtype.
    slack = 2 * step * values.abs().double()
    assert (apart <= (known[low] - values.double()).abs() + slack).all()
    assert (apart <= (known[high] - values.double()).abs() + slack).all()
