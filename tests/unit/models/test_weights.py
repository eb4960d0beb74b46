"""Folders: strict both ways, known prefixes, shards, ties, dtypes, and nothing that runs."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.core.errors import InputError
from danlu.models import weights
from danlu.models.families import check_vocabulary, read_config
from tests.unit.models.tiny import FAMILIES, VOCABULARY, alone, lively

TOKENS = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family = FAMILIES[request.param]
    weights.save(tmp_path, family, lively(family).named_parameters(), dtype=torch.float32)
    return tmp_path


def hidden(folder: Path) -> Tensor:
    return weights.restore(folder)[1](TOKENS, *alone(TOKENS))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change({k: v.clone() for k, v in load_file(file).items()}), file)


def edit(folder: Path, **facts: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_parameters_come_back(name: str, tmp_path: Path) -> None:
    model = lively(FAMILIES[name])
    weights.save(tmp_path, FAMILIES[name], model.named_parameters(), dtype=torch.float32)
    family, again = weights.restore(tmp_path)
    assert family.shape() == FAMILIES[name].shape()
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "module._orig_mod."])
def test_known_prefixes_are_taken_off_and_said(
    folder: Path, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = hidden(folder)
    count = len(load_file(folder / "model.safetensors"))
    rewrite(folder, lambda t: {prefix + name: value for name, value in t.items()})
    monkeypatch.setattr(logging.getLogger("danlu"), "propagate", True)
    with caplog.at_level(logging.INFO, "danlu"):
        assert torch.equal(hidden(folder), wanted)
    assert f"{count} of {count} tensors loaded, {count} after the prefix {prefix!r}" in caplog.text


def test_a_missing_base_prefix_and_wrappers_inside_are_known(folder: Path) -> None:
    wanted = hidden(folder)
    rewrite(folder, lambda t: {name.split(".", 1)[1].replace("h.0.", "h.0._orig_mod."): t[name] for name in t})
    assert torch.equal(hidden(folder), wanted)


def test_every_fault_is_named_in_one_error(folder: Path) -> None:
    names = sorted(load_file(folder / "model.safetensors"))
    gone, bent = names[0], names[-1]

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors[gone]
        tensors[bent] = torch.zeros(3, 5)
        return {**tensors, "adapter.weight": torch.zeros(1), "other": torch.zeros(1)}

    rewrite(folder, spoil)
    with pytest.raises(InputError) as error:
        weights.load(folder)
    for said in (f"missing {gone}", f"{bent} is [3, 5], not", "extra adapter.weight", "extra other"):
        assert said in str(error.value)


def test_nothing_matching_is_refused(folder: Path) -> None:
    rewrite(folder, lambda t: {f"student.{name}": value for name, value in t.items()})
    with pytest.raises(InputError, match=r"extra student\."):
        weights.load(folder)


def test_the_same_parameter_twice_is_refused(folder: Path) -> None:
    rewrite(folder, lambda t: t | {f"module.{next(iter(t))}": next(iter(t.values())).clone()})
    with pytest.raises(InputError, match="are both"):
        weights.load(folder)


def test_buffers_of_old_files_are_passed_over(folder: Path) -> None:
    wanted = hidden(folder)
    rewrite(folder, lambda t: t | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)})
    assert torch.equal(hidden(folder), wanted)


def test_a_tied_head_is_stored_once_and_tied_again(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    _, model = weights.restore(folder)
    assert model.heads["language"].weight is model.embed.weight


def test_a_tied_model_saves_from_a_state_that_holds_the_tie_twice(tmp_path: Path) -> None:
    model = lively(FAMILIES["llama"])
    assert "heads.language.weight" in model.state_dict()
    weights.save(tmp_path, FAMILIES["llama"], model.state_dict().items(), dtype=torch.float32)
    assert torch.equal(hidden(tmp_path), model(TOKENS, *alone(TOKENS)))


def test_a_head_beside_a_tie_must_be_the_embedding(folder: Path) -> None:
    table = next(v for k, v in load_file(folder / "model.safetensors").items() if "embed" in k or "wte" in k)
    rewrite(folder, lambda t: t | {"lm_head.weight": table.clone()})
    weights.load(folder)
    rewrite(folder, lambda t: t | {"lm_head.weight": table + 1})
    with pytest.raises(InputError, match=r"lm_head\.weight differs"):
        weights.load(folder)


def test_shards_hold_all_within_their_size(folder: Path) -> None:
    wanted, family = hidden(folder), read_config(folder)
    weights.save(folder, family, weights.load(folder)[1], dtype=torch.float32, max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = [sum(v.nbytes for v in load_file(folder / file).values()) for file in files]
    assert sum(sizes) == index["metadata"]["total_size"]
    assert max(sizes) <= 20_000
    assert torch.equal(hidden(folder), wanted)
    weights.save(folder, family, weights.load(folder)[1], dtype=torch.float32)
    assert [p.name for p in folder.glob("model*")] == ["model.safetensors"]  # the old shards and index are gone
    assert torch.equal(hidden(folder), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_headers_config_and_size_say_the_dtype_that_was_asked(folder: Path, dtype: torch.dtype) -> None:
    weights.save(folder, read_config(folder), weights.load(folder)[1], dtype=dtype)
    assert {v.dtype for v in load_file(folder / "model.safetensors").values()} == {dtype}
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == str(dtype).removeprefix("torch.")
    assert weights.restore(folder)[1].embed.weight.dtype == dtype
    assert weights.restore(folder, dtype=torch.float32)[1].embed.weight.dtype == torch.float32


def test_saving_is_strict_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    family, model = FAMILIES["llama"], lively(FAMILIES["llama"])
    named = dict(model.named_parameters())
    gone = named.pop("norm.weight")
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        weights.save(tmp_path, family, named.items(), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"extra\.weight is no parameter"):
        weights.save(tmp_path, family, {**named, "extra.weight": gone}.items(), dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_copy_names_what_does_not_fit() -> None:
    model = FAMILIES["llama"].build()
    tensors = {name: value.detach() for name, value in lively(FAMILIES["llama"]).named_parameters()}
    assert weights.copy(model, tensors.items()) == len(tensors)
    del tensors["norm.weight"]
    with pytest.raises(InputError, match=r"extra x; missing norm\.weight"):
        weights.copy(model, [*tensors.items(), ("x", torch.zeros(1))])


class _Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


def test_a_pickle_is_refused_and_never_opened(folder: Path) -> None:
    marker = folder / "touched"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(marker)))
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*can run code"):
        weights.load(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Touch(marker)))
    with pytest.raises(InputError, match="damaged or no safetensors"):
        weights.load(folder)
    assert not marker.exists()


def test_code_in_a_folder_is_refused_and_never_run(folder: Path) -> None:
    marker = folder / "touched"
    (folder / "modeling_mine.py").write_text(f"open({str(marker)!r}, 'w')")
    weights.load(folder)
    assert not marker.exists()
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    with pytest.raises(InputError, match="auto_map"):
        weights.load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["../evil.safetensors", "/tmp/evil.safetensors", "a/b.safetensors", "x.bin", ".."])
def test_an_index_may_not_point_elsewhere(folder: Path, place: str) -> None:
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    with pytest.raises(InputError, match="points to"):
        weights.load(folder)


def test_an_index_must_agree_with_its_files(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        places = dict.fromkeys(opened.keys(), "model.safetensors")
    places["not.there"] = "model.safetensors"
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=r"disagree about not\.there"):
        weights.load(folder)
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": {**places, "not.there": "gone.safetensors"}}))
    with pytest.raises(InputError, match=r"gone\.safetensors is missing"):
        weights.load(folder)


@pytest.mark.parametrize("content", ["{", "[1]", '{"model_type": 3}', '{"model_type": "mamba"}', "\ud800"])
def test_configs_that_say_nothing_known_are_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(folder)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"model_type": "mamba"}, "one of llama, gpt2"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' rope scaling"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear' rope scaling"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "quick"}, "'quick'"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": "wide"}, "whole number"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, facts: dict[str, object], said: str) -> None:
    family = FAMILIES["llama"]
    weights.save(tmp_path, family, lively(family).named_parameters(), dtype=torch.float32)
    edit(tmp_path, **facts)
    with pytest.raises(InputError, match=said):
        read_config(tmp_path)


def test_both_spellings_of_theta_are_read(tmp_path: Path) -> None:
    family = FAMILIES["llama-untied-biased"]
    weights.save(tmp_path, family, lively(family).named_parameters(), dtype=torch.float32)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    for gone in ("rope_theta", "rope_parameters"):
        file.write_text(json.dumps({key: value for key, value in whole.items() if key != gone}))
        assert read_config(tmp_path).shape().theta == 500.0


def test_a_run_folder_stands_for_its_model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    (run / "model").symlink_to(folder)
    assert torch.equal(hidden(run), hidden(folder))
    with pytest.raises(InputError, match="is no model"):
        weights.load(folder / "nothing")


def test_a_tokenizer_with_more_ids_than_rows_is_refused_with_both_numbers() -> None:
    check_vocabulary(FAMILIES["llama"], VOCABULARY, tokenizer="byte")
    check_vocabulary(FAMILIES["llama"], 90, tokenizer="byte")
    with pytest.raises(InputError, match=r"258 ids.*101 rows"):
        check_vocabulary(FAMILIES["llama"], 258, tokenizer="byte")


def test_control_tokens_are_written_where_generation_looks(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    named = lively(family).named_parameters()
    weights.save(tmp_path, family, named, dtype=torch.float32, control={"eos_token_id": [5, 7], "pad_token_id": 9})
    for file in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / file).read_text())
        assert (said["eos_token_id"], said["pad_token_id"], said["bos_token_id"]) == ([5, 7], 9, None)
