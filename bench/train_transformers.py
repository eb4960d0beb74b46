"""transformers.Trainer on LlamaForCausalLM of the same sizes and tokens."""

from __future__ import annotations

import tempfile

from common import Meter, options, tokens

chosen = options()

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


def main() -> None:
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=chosen.vocab,
        hidden_size=chosen.dim,
        intermediate_size=chosen.ffn,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.heads,
        max_position_embeddings=max(chosen.seq, 1024),
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    meter = Meter("transformers.Trainer", chosen)

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            meter.tick()

    rows = tokens(chosen, chosen.mb * (chosen.warm + chosen.steps))[:, :-1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=chosen.mb,
            max_steps=chosen.warm + chosen.steps,
            learning_rate=3e-4,
            use_cpu=True,
            bf16=chosen.dtype == "bf16",
            report_to="none",
            save_strategy="no",
            logging_steps=10,
            torch_compile=chosen.compile,
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[Tick()]).train()
    meter.report()


main()
