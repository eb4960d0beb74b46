"""Families against transformers: logits, loss, every gradient; folders both ways; a real model's golden answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from danlu.models import weights
from danlu.models.families import Family
from danlu.models.stack import Trunk
from tests.shared import shared
from tests.unit.models.tiny import FAMILIES, VOCABULARY, alone, lively

TOKENS = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))


def theirs(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    if dtype == torch.float64 and hasattr(model, "model"):
        _make_exact(model)
    return model.eval()


def _make_exact(model: transformers.PreTrainedModel) -> None:
    """transformers computes Llama's norms and phases in fp32 whatever the model's dtype: here, in float64."""

    def norm(self: torch.nn.Module, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)

    def phases(self: torch.nn.Module, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        size, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
        steps = 1 / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = position_ids[..., None].double() * steps
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(norm, module)
        if type(module).__name__ == "LlamaRotaryEmbedding":
            module.forward = MethodType(phases, module)


def logits(model: Trunk, tokens: Tensor, packed: bool = False) -> Tensor:
    positions, documents = alone(tokens)
    return model.heads["language"].logits(model(tokens, positions, documents, packed))


def their_gradients(family: Family, model: Trunk) -> dict[str, Tensor]:
    """Our gradients, under their names and in their layout."""
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    table = {}
    for stored in family.stored():
        whole = torch.cat([ours[part] for part in stored.parts])
        table[stored.name] = whole.T if stored.transposed else whole
    return table


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_theirs(name: str, dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    family, model = FAMILIES[name], lively(FAMILIES[name], dtype)
    weights.save(tmp_path, family, model.named_parameters(), dtype=dtype)
    other = theirs(tmp_path, dtype)
    out = other(TOKENS, labels=TOKENS)
    # transformers' own loss rounds float64 logits to fp32: it is checked below, and theirs is made of its logits
    their_loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    their_loss.backward()
    positions, documents = alone(TOKENS)
    hidden = model(TOKENS, positions, documents, packed=False)
    labels = F.pad(TOKENS[:, 1:], (0, 1), value=-100)
    loss = model.heads["language"].nll(hidden, labels) / (labels >= 0).sum()
    loss.backward()
    assert out.logits.std() > 0.5  # weights at which a fault would show
    torch.testing.assert_close(logits(model, TOKENS), out.logits, atol=bound, rtol=bound)
    torch.testing.assert_close(loss, their_loss, atol=bound, rtol=0)
    assert abs(loss.item() - out.loss.item()) < 1e-5
    gradients = their_gradients(family, model)
    named = dict(other.named_parameters())
    assert gradients.keys() == named.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, named[key].grad, atol=bound, rtol=bound, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", FAMILIES)
def test_their_folder_opens_here_with_equal_logits(name: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**FAMILIES[name].to_config())
    torch.manual_seed(0)
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    other.save_pretrained(tmp_path)
    family, model = weights.restore(tmp_path)
    assert family.shape() == FAMILIES[name].shape()
    torch.testing.assert_close(logits(model, TOKENS), other(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_a_real_model_meets_its_golden_answers() -> None:
    folder = shared("weights/stories260k_hf")
    golden = json.loads((folder / "expected_greedy.json").read_text())
    _, model = weights.restore(folder)
    ids = torch.tensor([golden["greedy_ids"]])
    with torch.no_grad():
        scores = logits(model, ids)[0]
    begun = len(golden["prompt_ids"])
    assert scores[begun - 1 : -1].argmax(-1).tolist() == golden["greedy_ids"][begun:]
    for place, key in ((begun - 1, "logits_after_bos_first_8"), (-1, "logits_at_last_position_first_8")):
        torch.testing.assert_close(scores[place, :8], torch.tensor(golden[key]), atol=1e-4, rtol=0)
    nll = F.cross_entropy(scores[begun - 1 : -1], ids[0, begun:])
    assert abs(nll.item() - golden["mean_nll_of_greedy_ids"]) < 1e-4
