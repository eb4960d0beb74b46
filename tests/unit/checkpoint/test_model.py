from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from danlu.checkpoint import model
from danlu.checkpoint.disk import Disk
from danlu.core.errors import Failure, InputError
from danlu.data import tokenizer as tokenizers
from danlu.models.families import Llama
from danlu.models.stack import Trunk
from danlu.models.start import fill

FAMILY = Llama(
    vocab_size=258,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def trunk(seed: int) -> Trunk:
    with torch.device("meta"):
        made = FAMILY.build()
    made.to_empty(device="cpu")
    fill(made, seed)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_tied_model_opens_elsewhere_with_the_same_logits(tmp_path: Path) -> None:
    ours, tokenizer = trunk(1), tokenizers.load("byte")
    model.publish(tmp_path / "model", FAMILY, ours.named_parameters(), tokenizer)
    assert names(tmp_path) == ["model"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.config.eos_token_id == tokenizer.eos_id == 256
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    ids = torch.tensor([list(b"a furnace")])
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        hidden = ours(ids, positions, torch.zeros_like(ids), packed=False)
        assert torch.allclose(ours.heads["language"].logits(hidden), theirs(ids).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a furnace")["input_ids"] == list(b"a furnace")


def test_the_new_one_replaces_the_old_one_in_another_type(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "model", tokenizers.load("byte")
    model.publish(folder, FAMILY, trunk(1).named_parameters(), tokenizer)
    (folder / "stray.txt").write_text("of the old one")
    size = (folder / "model.safetensors").stat().st_size
    model.publish(folder, FAMILY, trunk(2).named_parameters(), tokenizer, dtype=torch.bfloat16)
    assert names(tmp_path) == ["model"] and "stray.txt" not in names(folder)
    assert (folder / "model.safetensors").stat().st_size < 0.6 * size
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.bfloat16
    expected = dict(trunk(2).named_parameters())["embed.weight"].bfloat16()
    assert torch.equal(theirs.model.embed_tokens.weight, expected)


def test_the_old_one_stays_where_the_disk_fails_at_any_moment_of_the_swap(tmp_path: Path) -> None:
    class Fails(Disk):
        left = 0

        def _may(self) -> None:
            self.left -= 1
            if self.left == -1:
                raise OSError(errno.ENOSPC, "No space left on device")

        def rename(self, old: Path, new: Path) -> None:
            self._may()
            super().rename(old, new)

        def sync_folder(self, path: Path) -> None:
            self._may()
            super().sync_folder(path)

    folder, tokenizer = tmp_path / "model", tokenizers.load("byte")
    model.publish(folder, FAMILY, trunk(1).named_parameters(), tokenizer)
    before = (folder / "model.safetensors").read_bytes()
    for at in range(3):  # the sync of the new one, and each rename
        disk = Fails()
        disk.left = at
        with pytest.raises(Failure, match=r"model: the model was not written: the disk is full .* is untouched"):
            model.publish(folder, FAMILY, trunk(2).named_parameters(), tokenizer, disk=disk)
        assert names(tmp_path) == ["model"]
        assert (folder / "model.safetensors").read_bytes() == before


def test_a_swap_that_was_cut_off_is_put_right(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model.publish(folder, FAMILY, trunk(1).named_parameters(), tokenizers.load("byte"))
    folder.rename(tmp_path / "model.old")
    (tmp_path / "model.tmp").mkdir()
    model.settle(folder)
    assert names(tmp_path) == ["model"] and (folder / "config.json").exists()


def test_a_rehearsal_tells_the_size_and_leaves_nothing(tmp_path: Path) -> None:
    ours, tokenizer = trunk(1), tokenizers.load("byte")
    size = model.rehearse(tmp_path / "model", FAMILY, ours.named_parameters(), tokenizer)
    assert names(tmp_path) == []
    model.publish(tmp_path / "model", FAMILY, ours.named_parameters(), tokenizer)
    assert size == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())


def test_a_model_that_could_not_be_stored_is_found_before_training(tmp_path: Path) -> None:
    ours, tokenizer = dict(trunk(1).named_parameters()), tokenizers.load("byte")
    ours.pop("norm.weight")
    with pytest.raises(ValueError, match=r"parameters are missing: norm\.weight"):
        model.rehearse(tmp_path / "model", FAMILY, ours.items(), tokenizer)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the model was not written"):
        model.rehearse(tmp_path / "file" / "model", FAMILY, trunk(1).named_parameters(), tokenizer)
    assert names(tmp_path) == ["file"]
