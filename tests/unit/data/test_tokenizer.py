"""Tokenizers: documents, control tokens, fingerprints, saving, training, and refusals."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import danlu
from danlu.core.errors import InputError
from danlu.data.tokenizer import Tokenizer, load, train
from danlu.data.tokenizer.fertility import fertility
from danlu.data.tokenizer.forms import LLAMA3_WORDS, letters
from tests.shared import shared

SHIPPED = Path(danlu.__file__).parent / "recipe" / "shipped"
MARKS = "a<|endoftext|>b</s><s><|im_start|><|padding|><|begin_of_text|> <|endoftext|>"
ODD = [
    "",
    " ",
    "  a  ",
    "\n\n\t x\r\n",
    "🙂👩‍👩‍👧",
    "e\u0301\u00a0\u3000\u200b\ufeff",
    "话说宝玉，黛玉。",
    "x" * 3000,
    MARKS,
]


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return load(SHIPPED / "tokenizer")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rows = (SHIPPED / "text" / "classics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return [(SHIPPED / "text" / "shakespeare.txt").read_text(encoding="utf-8"), *(json.loads(r)["text"] for r in rows)]


def folder_with(path: Path, *, names: dict[str, object], added: tuple[str, ...] = (), **parts: object) -> Path:
    """A Hugging Face folder with a byte-level tokenizer without merges, and the names given."""
    form = tokenizers.Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters().items()}, merges=[]))
    form.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    form.decoder = decoders.ByteLevel()
    form.add_special_tokens([AddedToken(name, special=True) for name in added])
    path.mkdir(parents=True)
    (path / "tokenizer.json").write_text(json.dumps(json.loads(form.to_str()) | parts))
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def test_byte_ids_are_the_bytes() -> None:
    byte = load("byte")
    assert byte.encode("aé") == [97, 0xC3, 0xA9]
    assert (byte.vocab_size, byte.eos_id, byte.pad_id, byte.bos_id) == (258, 256, 257, None)
    assert byte.document("hi") == [104, 105, 256]
    assert byte.decode([0xE4, 0xBD, 104]) == "\ufffdh"


@pytest.mark.parametrize("name", ["byte", "shipped"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back(name: str, text: str) -> None:
    tokenizer = _kept(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text), default=0) < tokenizer.vocab_size


def _kept(name: str, kept: dict[str, Tokenizer] = {}) -> Tokenizer:  # noqa: B006 - read once for all examples
    if name not in kept:
        kept[name] = load(SHIPPED / "tokenizer" if name == "shipped" else name)
    return kept[name]


def test_a_document_ends_once_also_where_its_text_ends_with_the_mark(shipped: Tokenizer) -> None:
    for tokenizer in (load("byte"), shipped):
        for text in ("once", "once<|endoftext|>", "<|endoftext|>", ""):
            ids = tokenizer.document(text)
            assert ids.count(tokenizer.eos_id) == 1 and ids[-1] == tokenizer.eos_id
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(ids, control=True) == text + "<|endoftext|>"
    assert load("byte").rule == (
        'a document begins with no token of its own and ends with exactly one "<|endoftext|>" (256)'
    )


def test_a_begin_token_is_put_once(tmp_path: Path) -> None:
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    tokens = ("<s>", "</s>")
    by_template = load(folder_with(tmp_path / "a", names=names, added=tokens, post_processor=template))
    by_config = load(folder_with(tmp_path / "b", names=names | {"add_bos_token": True}, added=tokens))
    neither = load(folder_with(tmp_path / "c", names=names, added=tokens))
    both = load(
        folder_with(tmp_path / "d", names=names | {"add_bos_token": True}, added=tokens, post_processor=template)
    )
    for tokenizer in (by_template, by_config, both):
        assert tokenizer.document("<s>a") == [256, 60, 115, 62, 97, 257]
        assert tokenizer.fingerprint == both.fingerprint
    assert neither.document("a") == [97, 257]
    assert neither.bos_id == 256 and neither.begin == []
    assert neither.fingerprint != both.fingerprint


def test_control_tokens_are_never_made_out_of_text(shipped: Tokenizer, tmp_path: Path) -> None:
    added = ("<s>", "</s>", "<|im_start|>", "<|endoftext|>", "<|padding|>")
    many = load(folder_with(tmp_path / "many", names={"eos_token": "</s>"}, added=added))
    assert set(many.control) == set(added)
    for tokenizer in (load("byte"), shipped, many):
        for ids in (tokenizer.encode(MARKS), *tokenizer.encode_batch([MARKS])):
            assert not set(ids) & set(tokenizer.control.values())
            assert tokenizer.decode(ids) == MARKS


def test_a_unigram_model_cannot_spell_its_control_tokens(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<", -2.0), ("/", -2.0), ("s", -2.0), (">", -2.0), ("▁", -2.0)]
    form = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    form.add_special_tokens(["<unk>", "</s>"])
    form.save(str(tmp_path / "tokenizer.json"))
    form.encode_special_tokens = True
    assert form.encode("</s>").ids == [1]  # what the library makes of it, whatever is asked
    assert load(tmp_path).document("s</s>") == [4, 2, 3, 4, 5, 1]


def test_a_model_that_spells_a_control_token_is_refused(tmp_path: Path) -> None:
    form = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "end": 1}, unk_token="<unk>"))
    form.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    form.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "end"}')
    with pytest.raises(InputError, match='the text "end" would become a control token'):
        load(tmp_path)


def test_settings_that_lose_or_change_ids_are_switched_off(tmp_path: Path) -> None:
    limits = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    }
    names = {"eos_token": "</s>"}
    plain = load(folder_with(tmp_path / "plain", names=names, added=("</s>",)))
    limited = load(folder_with(tmp_path / "limited", names=names, added=("</s>",), **limits))
    assert limited.encode("a" * 20) == [97] * 20
    assert limited.encode_batch(["a", "b" * 20]) == [[97], [98] * 20]
    assert limited.fingerprint == plain.fingerprint


def test_dropout_is_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocab = {letter: byte for byte, letter in letters().items()} | {"ab": 256, "abab": 257}
    form = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab")], dropout=0.9))
    form.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    form.add_special_tokens(["<|endoftext|>"])
    form.save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level("INFO", logger="danlu"):
        tokenizer = load(tmp_path)
    assert "dropout is switched off" in caplog.text
    assert all(tokenizer.encode("abab") == [257] for _ in range(20))


@pytest.mark.parametrize("name", ["byte", "shipped"])
def test_saved_and_pickled_it_is_the_same(name: str, tmp_path: Path) -> None:
    tokenizer = _kept(name)
    tokenizer.save(tmp_path / "once")
    once = load(tmp_path / "once")
    once.save(tmp_path / "twice" / "model")
    twice = load(tmp_path / "twice")  # a run's folder: its model/ is meant
    copy = pickle.loads(pickle.dumps(tokenizer))
    for other in (once, twice, copy):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.control == tokenizer.control and other.pad_id == tokenizer.pad_id
        for text in ODD:
            assert other.document(text) == tokenizer.document(text)
            assert other.encode_batch(ODD) == tokenizer.encode_batch(ODD)


def test_the_fingerprint_tells_what_determines_ids(tmp_path: Path) -> None:
    tokens = ("<s>", "</s>", "<pad>")
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    made = [
        folder_with(tmp_path / "a", names=names, added=tokens),
        folder_with(tmp_path / "b", names=names, added=("</s>", "<s>", "<pad>")),
        folder_with(tmp_path / "c", names=names | {"eos_token": "<s>"}, added=tokens),
        folder_with(tmp_path / "d", names=names | {"pad_token": "<s>"}, added=tokens),
        folder_with(tmp_path / "e", names=names, added=tokens, normalizer={"type": "NFC"}),
        folder_with(tmp_path / "f", names=names, added=(*tokens, "<more>")),
    ]
    assert len({load(folder).fingerprint for folder in made}) == len(made)
    same = folder_with(tmp_path / "g", names=names | {"chat_template": "{{ messages }}"}, added=tokens)
    assert load(same).fingerprint == load(made[0]).fingerprint
    load(same).save(tmp_path / "h")
    assert load(tmp_path / "h").chat_template == "{{ messages }}"


def test_tokens_that_only_the_files_beside_it_know(tmp_path: Path) -> None:
    decoder = {"257": {"content": "<|im_end|>", "special": True}, "258": {"content": "<think>", "special": False}}
    folder = folder_with(tmp_path / "a", names={"eos_token": "</s>", "added_tokens_decoder": decoder}, added=("</s>",))
    tokenizer = load(folder)
    assert tokenizer.vocab_size == 259
    assert tokenizer.control == {"</s>": 256, "<|im_end|>": 257}
    assert tokenizer.encode("a<think>") == [97, 258]  # an ordinary token, not a control token
    assert tokenizer.decode([97, 258]) == "a<think>"
    (folder / "added_tokens.json").write_text('{"<more>": 300}')
    with pytest.raises(InputError, match='give "<more>" the id 300, but its id here is 2'):
        load(folder)


def test_the_end_is_found_or_asked_for(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "a", names={}, added=("<stop>",))
    with pytest.raises(InputError, match=r'<\|endoftext\|>, .*</s>.* is there; write {"eos_token": "…"}'):
        load(folder)
    (folder / "config.json").write_text('{"eos_token_id": [256, 3]}')
    assert load(folder).eos_id == 256
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(InputError, match='eos_token is "<gone>", which is not among the tokens'):
        load(folder)
    assert load(folder_with(tmp_path / "b", names={}, added=("</s>", "<|endoftext|>"))).eos_id == 257


def test_what_cannot_be_read_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such tokenizer"):
        load(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"holds no tokenizer; looked for tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match=r"merges\.txt is missing"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(InputError, match=r"tokenizer\.json: not JSON"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(InputError, match="tokenizers library cannot read it"):
        load(tmp_path)
    (tmp_path / "a.model").write_bytes(b"\x00\xff nothing of the kind")
    with pytest.raises(InputError, match="neither a SentencePiece model nor a tiktoken rank file"):
        load(tmp_path / "a.model")
    (tmp_path / "b.tiktoken").write_text("IQ== 0\nIg== one\n")
    with pytest.raises(InputError, match="line 2 is not a token in base64 and its rank"):
        load(tmp_path / "b.tiktoken")
    (tmp_path / "b.tiktoken").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(InputError, match=r"2 ranks; only Llama 3's \(128,000\)"):
        load(tmp_path / "b.tiktoken")


def test_half_a_surrogate_pair_is_refused(shipped: Tokenizer) -> None:
    for tokenizer in (load("byte"), shipped):
        with pytest.raises(InputError, match=r"character 2 of a text is '\\ud800', half of a surrogate pair"):
            tokenizer.encode("ab\ud800")
        with pytest.raises(InputError, match="half of a surrogate pair"):
            tokenizer.encode_batch(["fine", "ab\ud800"])


def test_bytes_without_a_token_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    form = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    form.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    form.add_special_tokens(["</s>"])
    form.save(str(tmp_path / "tokenizer.json"))
    load(tmp_path)
    assert "254 of the 256 bytes have no token (0x00, 0x01, 0x02, 0x03, …)" in caplog.text


def test_an_id_that_no_token_has_is_shown() -> None:
    assert load("byte").decode([97, 300, 98, 256]) == "a\ufffdb"


def reference_bpe(texts: list[str], *, merges: int) -> list[tuple[bytes, bytes]]:
    """Byte-pair encoding as its paper has it, word by word: the commonest pair first, the lower ids where two tie.

    Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, 2016.
    """
    words = Counter(word for text in texts for word in regex.findall(LLAMA3_WORDS, text))
    order = sorted(letters().values())
    ids = {bytes([byte]): order.index(letter) for byte, letter in letters().items()}
    split = {word: [bytes([b]) for b in word.encode()] for word in words}
    learnt: list[tuple[bytes, bytes]] = []
    while len(learnt) < merges:
        pairs = Counter[tuple[bytes, bytes]]()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        learnt.append(best)
        ids.setdefault(best[0] + best[1], 256 + len(learnt))
        for parts in split.values():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [best[0] + best[1]]
                i += 1
    return learnt


def test_training_learns_the_merges_of_the_paper(texts: list[str]) -> None:
    few = [texts[0][:8000], texts[1][:1500]]
    tokenizer = train(few, vocab_size=258 + 120)
    table = {letter: byte for byte, letter in letters().items()}
    found = [
        tuple(bytes(table[c] for c in part) for part in pair) for pair in json.loads(tokenizer.sheet)["model"]["merges"]
    ]
    assert found == reference_bpe(few, merges=120)


def test_training_does_not_depend_on_the_order_of_texts(texts: list[str]) -> None:
    few = [text[:20000] for text in texts[:6]]
    first = train(few, vocab_size=700)
    random.Random(1).shuffle(few)
    assert train(few, vocab_size=700).fingerprint == first.fingerprint
    assert first.vocab_size == 700
    assert (first.control, first.eos_id, first.pad_id) == ({"<|endoftext|>": 0, "<|padding|>": 1}, 0, 1)


def test_training_the_shipped_tokenizer_again_gives_it(shipped: Tokenizer, texts: list[str]) -> None:
    # Golden: printed by scripts/make_demo.py on the day the texts were chosen.
    assert shipped.fingerprint == "4e5ecd2dc59bb4dd67070d62f0eb6bbf283792dedac68543f2686abcee812602"
    assert shipped.vocab_size == 4096
    assert train(texts, vocab_size=4096).fingerprint == shipped.fingerprint


def test_training_refuses_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="a vocabulary of 257 is too small: 258 are needed"):
        train(["a"], vocab_size=257)
    with pytest.raises(InputError, match="no text to learn a tokenizer from"):
        train(["", ""], vocab_size=300)
    assert train(["abc"], vocab_size=258).vocab_size == 258
    train(["abab abab"], vocab_size=1000)
    assert "the texts are enough for" in caplog.text and "not for 1,000" in caplog.text


def test_fertility_counts_words_or_characters_by_script(shipped: Tokenizer) -> None:
    text = "one two three\n话说宝玉。\n\n12 34\n"
    rows = {row.script: row for row in fertility(load("byte"), [text])}
    assert (rows["Latin"].size, rows["Latin"].tokens, rows["Latin"].words) == (14, 14, 3)
    assert (rows["Han"].size, rows["Han"].words, rows["Han"].spaced) == (16, 4, False)
    assert rows["Han"].tokens_per_word == 4.0 and rows["Latin"].bytes_per_token == 1.0
    assert sum(row.size for row in rows.values()) == len(text.encode())
    assert sum(row.tokens for row in fertility(shipped, [text])) < len(text.encode()) / 2


def test_shipped_texts_are_what_the_readme_says() -> None:
    readme = (SHIPPED / "README.md").read_text(encoding="utf-8")
    for file in sorted((SHIPPED / "text").iterdir()):
        content = file.read_bytes()
        assert f"{len(content):,}" in readme and hashlib.sha256(content).hexdigest() in readme
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) < 3_000_000


def test_one_of_the_shared_files_lacks_bytes(caplog: pytest.LogCaptureFixture) -> None:
    tiny = load(shared("tokenizers/tiny_bpe"))
    assert (tiny.eos_id, tiny.bos_id, tiny.pad_id, tiny.vocab_size) == (2003, 2002, 2001, 2020)
    assert "have no token" in caplog.text


@pytest.mark.parametrize(("file", "library"), [("llama3", "tiktoken"), ("mistral_v1", "sentencepiece")])
def test_a_library_that_is_missing_is_named(file: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(InputError, match=rf"needs the library {library}: pip install 'danlu\[tokenizers\]'"):
        load(shared(f"tokenizers/{file}"))
