"""Numbers kept in 8 bits, a scale for each block (Dettmers et al. 2022, arXiv:2110.02861, sections 2 and 3).

The dynamic map: a code's leading zeros say which power of ten, what is left of it cuts that decade into equal cells,
and a code stands for its cell's middle; 0 and 1 have codes of their own. Signed for first moments; second moments are
never negative, and have their sign's bit for finer cells. Blocks lie within rows, so that no cut of a weight by rows
moves one.

One thing is not the paper's: a second moment that is not zero never becomes zero, but the smallest number there is. As
zero it would leave its first moment, which is the root of as small a share and is kept, to be divided by next to
nothing.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST = 256  # numbers in a block, at most
DECADES = 7


def columns(length: int) -> int:
    """Blocks of a row: as few, and as alike, as can be."""
    return math.ceil(length / LONGEST)


@functools.cache
def table(*, signed: bool) -> tuple[float, ...]:
    """The 256 numbers that codes stand for, ascending."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        cells = 2 ** (decade if signed else decade + 1)
        middles = [0.1 + 0.9 * (cell + 0.5) / cells for cell in range(cells)]
        scale = 10.0 ** (decade - DECADES + 1)
        found += [scale * middle for middle in middles] + [-scale * middle for middle in middles if signed]
    return tuple(sorted(found))


def encode(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """codes [n, m] (uint8) and scales [n, blocks] stand for values [n, m], each by the nearest number there is.

    A block's scale is its largest magnitude. Unsigned, what is above zero stays so.
    """
    cut = _cut(values)
    torch.amax(cut.abs(), -1, out=scales)
    shares = (cut / torch.where(scales > 0, scales, 1.0)[..., None]).flatten()
    first, edges = _guesses(signed, values.dtype, values.device)
    # The upper half of a number's bits says its code or the one below: no wider than the narrowest cell. (Searching
    # for it among all edges took fifty times as long.)
    guessed = first.index_select(0, shares.float().view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF))
    guessed += shares > edges.index_select(0, guessed.to(torch.int32))
    codes.copy_(guessed.view(values.shape[0], -1)[:, : values.shape[1]])


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values [n, m] that codes and scales stand for, in the scales' dtype."""
    rows, length = codes.shape
    known = _known(signed, scales.dtype, codes.device)
    values = known.index_select(0, codes.flatten().to(torch.int32)).view(rows, length)
    each = math.ceil(length / columns(length))
    if length % each:
        return values.mul_(scales.repeat_interleave(each, 1)[:, :length])
    return values.view(rows, -1, each).mul_(scales[..., None]).view(rows, length)


@functools.cache
def _known(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(table(signed=signed), dtype=dtype, device=device)


@functools.cache
def _guesses(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each upper half of an fp32 number, the code of the least number that may have it; and for each code the
    largest number that has it.
    """
    known = _known(signed, torch.float64, torch.device("cpu"))
    edges = (known[1:] + known[:-1]) / 2
    if not signed:
        edges[0] = 0.0
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    least = halves.view(torch.float32).double().nan_to_num(0, 2, -2)
    least = torch.where(least < 0, least * (1 + 2**-7), least) - least.abs() * 2**-22  # of what was rounded to fp32 too
    first = torch.bucketize(least, edges).to(torch.uint8)
    return first.to(device), torch.cat([edges, edges.new_tensor([math.inf])]).to(device=device, dtype=dtype)


def _cut(values: Tensor) -> Tensor:
    """[n, m] as [n, blocks, numbers of a block], filled up with zeros where blocks are not alike."""
    blocks = columns(values.shape[1])
    each = math.ceil(values.shape[1] / blocks)
    if blocks * each != values.shape[1]:
        values = F.pad(values, (0, blocks * each - values.shape[1]))
    return values.view(values.shape[0], blocks, each)
