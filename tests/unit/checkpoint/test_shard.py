from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from danlu.checkpoint.disk import Disk
from danlu.checkpoint.shard import CHUNK, CODES, DTYPES, Span, check_span, read_span, view_bytes, write_shard


def test_every_type_reads_the_same_through_the_library(tmp_path: Path) -> None:
    bits = torch.randint(0, 128, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {}
    for dtype in CODES:
        raw = bits % 2 if dtype is torch.bool else bits
        tensors[str(dtype)] = raw.clone().view(dtype).reshape(2, -1)
    path = tmp_path / "x.safetensors"
    header, spans = write_shard(Disk(), path, tensors)
    got = load_file(path)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert bytes(view_bytes(got[name])) == bytes(view_bytes(tensor))
    content = path.read_bytes()
    for span in (header, *spans.values()):
        assert span.hash == xxhash.xxh3_128_hexdigest(content[span.start : span.start + span.size])
    assert sum(span.size for span in (header, *spans.values())) == len(content)
    with safe_open(path, framework="pt") as opened:
        for name in tensors:
            assert opened.get_slice(name).get_dtype() == CODES[tensors[name].dtype]


def test_slices_parameters_scalars_and_empties(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    weight = torch.nn.Parameter(torch.ones(3))
    tensors = {"column": base[:, 2], "turned": base.T, "one": torch.tensor(7), "none": torch.empty(0, 5), "w": weight}
    path = tmp_path / "x.safetensors"
    _, spans = write_shard(Disk(), path, tensors)
    got = load_file(path)
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor)
    with open(path, "rb", buffering=0) as file:
        for name, tensor in tensors.items():
            into = torch.empty(tensor.shape, dtype=tensor.dtype)
            assert read_span(file, spans[name], view_bytes(into)) and torch.equal(into, tensor)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_tensors_larger_than_a_chunk(tmp_path: Path, size: int) -> None:
    tensor = (torch.arange(size) % 251).to(torch.uint8)
    path = tmp_path / "x.safetensors"
    _, spans = write_shard(Disk(), path, {"t": tensor})
    assert torch.equal(load_file(path)["t"], tensor)
    span = spans["t"]
    assert span.hash == xxhash.xxh3_128_hexdigest(tensor.numpy())
    with open(path, "rb", buffering=0) as file:
        into = torch.zeros_like(tensor)
        assert read_span(file, span, view_bytes(into)) and torch.equal(into, tensor)
        assert check_span(file, span, bytearray(1000))
        beyond = Span(start=span.start, size=span.size + 1, hash=span.hash)
        assert not check_span(file, beyond, bytearray(1000))
        assert not read_span(file, beyond, memoryview(bytearray(size + 1)))


def test_codes_are_one_to_one() -> None:
    assert len(DTYPES) == len(CODES)
