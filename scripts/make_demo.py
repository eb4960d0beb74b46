"""Makes the texts and the tokenizer that come with danlu: DANLU_DATA=FOLDER python scripts/make_demo.py

Reads pretrain/tinyshakespeare.txt and pretrain/zh_classics.jsonl there, and writes src/danlu/recipe/shipped/text and
src/danlu/recipe/shipped/tokenizer. Running it again gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from danlu.data.tokenizer import train

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "src" / "danlu" / "recipe" / "shipped"
BOOKS = ("红楼梦", "儒林外史")
VOCABULARY = 4096
DIGITS = "零一二三四五六七八九"
STOPS = "。？！…—，；、"
MISSING = "〓"  # the printers' sign for a character that the type case lacks


def main() -> None:
    """The shipped texts and tokenizer are written, and their sizes and hashes are told."""
    data = Path(os.environ["DANLU_DATA"]) / "pretrain"
    text = SHIPPED / "text"
    text.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data / "tinyshakespeare.txt", text / "shakespeare.txt")
    (text / "shakespeare.txt").chmod(0o644)
    chapters = classics(data / "zh_classics.jsonl")
    lines = [json.dumps(chapter, ensure_ascii=False) + "\n" for chapter in chapters]
    (text / "classics.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")

    texts = [(text / "shakespeare.txt").read_text(encoding="utf-8"), *(chapter["text"] for chapter in chapters)]
    tokenizer = train(texts, vocab_size=VOCABULARY)
    assert tokenizer.vocab_size == VOCABULARY
    tokenizer.save(SHIPPED / "tokenizer")

    for name, part in (("English", texts[:1]), ("Chinese", texts[1:])):
        size, tokens = sum(len(t.encode()) for t in part), sum(len(tokenizer.document(t)) for t in part)
        print(f"{name}: {len(part)} documents, {size:,} bytes, {tokens:,} tokens, {size / tokens:.3f} bytes a token")
    print(f"tokenizer: {tokenizer.fingerprint}")
    for path in sorted([*text.iterdir(), *(SHIPPED / "tokenizer").iterdir()]):
        content = path.read_bytes()
        print(f"{path.relative_to(SHIPPED)}  {len(content):,}  {hashlib.sha256(content).hexdigest()}")


def classics(path: Path) -> list[dict[str, str]]:
    """The chapters of the novels, cleaned, in their order: {"book", "chapter", "text"}."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [(row["meta"]["book"], row["meta"]["chapter"], row["text"]) for row in rows if row["meta"]["book"] in BOOKS]
    rows.sort(key=lambda row: (BOOKS.index(row[0]), number(row[1])))
    chapters = []
    for book, chapter, text in rows:
        title, *paragraphs = text.split("\n")
        half = len(title) // 2  # a title is two lines of verse of equal length
        head = f"{chapter}　{title[:half]}　{title[half:]}"
        body = [clean(paragraph) for paragraph in paragraphs if paragraph.strip()]
        chapters.append({"book": book, "chapter": chapter, "text": "\n".join([head, *body]) + "\n"})
    return chapters


def number(chapter: str) -> int:
    """The number that 第…回 names: 第一百七回 is 107."""
    hundreds, _, rest = chapter.strip("第回").rpartition("百")
    tens, ten, ones = rest.rpartition("十")
    return (
        100 * bool(hundreds)
        + (10 * (DIGITS.find(tens) if tens else 1) if ten else 0)
        + max(DIGITS.find(ones or "零"), 0)
    )


def clean(paragraph: str) -> str:
    """A paragraph without what digitising left in it: lost quotation marks, characters, and four kinds of dash."""
    paragraph = re.sub(r"\{[^}]*\}|〈[^〉]*〉|[\ue000-\uf8ff■バ?A-Za-z0-9]", MISSING, paragraph)
    paragraph = re.sub(r"-{2,}|－+|─+|—+", "——", paragraph).replace(",", "，")
    return quoted(paragraph) or paragraph.replace(" ", "")


def quoted(paragraph: str) -> str:
    """The paragraph with its quotation marks, of which each was turned into a space; empty where they do not pair up.

    After a colon, at the start and outside quotations a mark opens. Inside, it closes; but within a speech, one that
    follows a character, not a stop, opens a quotation in the quotation.
    """
    out: list[str] = []
    depth: list[bool] = []  # whether each open quotation is a speech, which began after a colon or at the start
    for letter in paragraph:
        if letter != " ":
            out.append(letter)
            continue
        before = out[-1] if out else ""
        speech = before in ("", "：", "“", "‘")
        stop = out[-2] in STOPS if before == "’" else before in STOPS
        if speech or not depth or (depth == [True] and not stop):
            out.append("“‘"[len(depth) % 2])
            depth.append(speech)
        else:
            depth.pop()
            out.append("”’"[len(depth) % 2])
    return "" if depth else "".join(out)


if __name__ == "__main__":
    main()
