"""Whether memory ran out, and what is said then."""

from __future__ import annotations

import pytest
import torch

from danlu.memory.ledger import Ledger
from danlu.memory.shortage import ran_out, sentence


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_it_is_known(error: BaseException) -> None:
    assert ran_out(error)


def test_what_torch_really_raises_is_known() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert ran_out(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_failures_are_not_it(error: BaseException) -> None:
    assert not ran_out(error)


def test_the_sentence_has_the_parts_the_largest_first() -> None:
    ledger = Ledger("in the language head", {"weights": 1000, "activations": 2_500_000, "travel": 0})
    said = sentence("in update 7", ledger, free=3_000_000, remedies=["memory.recompute=full (1.0 MB)"])
    assert said == (
        "out of memory in update 7: about 2.5 MB of tensors were forecast (activations 2.5 MB, weights 1.0 kB), and "
        "3.0 MB were free when the run began; less would be needed with memory.recompute=full (1.0 MB)"
    )
