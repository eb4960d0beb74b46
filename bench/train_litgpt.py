"""litgpt's model, loss and precision, in the loop of its pretraining. Wants litgpt 0.5.13 in an environment of its own:

python3 -m venv /tmp/litgpt && /tmp/litgpt/bin/pip install torch==2.13.0 litgpt==0.5.13
/tmp/litgpt/bin/python bench/train_litgpt.py --vocab 4096 --seq 512 --dtype bf16 --steps 8
"""

from __future__ import annotations

from common import Meter, options, tokens

chosen = options()

import lightning
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed"}


def main() -> None:
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=PRECISION[chosen.dtype])
    config = Config(
        block_size=max(chosen.seq, 1024),
        n_layer=chosen.layers,
        n_embd=chosen.dim,
        n_head=chosen.heads,
        vocab_size=chosen.vocab,
        padded_vocab_size=chosen.vocab,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
        intermediate_size=chosen.ffn,
    )
    model = GPT(config)
    model.transformer.wte.weight = model.lm_head.weight
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    model = fabric.setup(torch.compile(model) if chosen.compile else model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    meter = Meter("litgpt-compiled" if chosen.compile else "litgpt", chosen)
    for block in tokens(chosen, chosen.mb * (chosen.warm + chosen.steps)).split(chosen.mb):
        logits = model(block[:, :-1].contiguous())
        loss = chunked_cross_entropy(logits, block[:, 1:].contiguous())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.tick(loss.item())
    meter.report()


main()
