"""The floor: a hand-written PyTorch loop on a Llama-style decoder, eager or --compile. Knows nothing of danlu."""

from __future__ import annotations

from common import Meter, options, tokens

chosen = options()

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(size, 1e-5), nn.RMSNorm(size, 1e-5)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.gate_up, self.down = nn.Linear(size, 2 * inner, bias=False), nn.Linear(inner, size, bias=False)

    def forward(self, x, cos, sin):
        rows, length, size = x.shape
        parts = self.qkv(self.first(x)).view(rows, length, 3, self.heads, size // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        seen = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, size))
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Decoder(nn.Module):
    def __init__(self, vocab: int, size: int, layers: int, heads: int, inner: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        self.blocks = nn.ModuleList(Block(size, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(size, 1e-5), nn.Linear(size, vocab, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        wave = 10000 ** (-torch.arange(0, size // heads, 2).float() / (size // heads))
        phases = torch.outer(torch.arange(length).float(), wave)
        self.register_buffer("cos", phases.cos(), persistent=False)
        self.register_buffer("sin", phases.sin(), persistent=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), labels.reshape(-1))


def main() -> None:
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    model = Decoder(chosen.vocab, chosen.dim, chosen.layers, chosen.heads, chosen.ffn, chosen.seq)
    run = torch.compile(model) if chosen.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    meter = Meter("plain-compiled" if chosen.compile else "plain-eager", chosen)
    for block in tokens(chosen, chosen.mb * (chosen.warm + chosen.steps)).split(chosen.mb):
        with torch.autocast("cpu", torch.bfloat16, enabled=chosen.dtype == "bf16"):
            loss = run(block[:, :-1].contiguous(), block[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.tick(loss.item())
    meter.report()


main()
