"""`danlu tokenizer train FILES… --vocab-size N --out FOLDER`: a tokenizer is learnt from raw files."""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from danlu.data.tokenizer import Tokenizer

SAMPLE = 1_000_000  # characters of each file on which the new tokenizer is measured
SHOWN = 24  # tokens of the sample line that are shown


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    verb = subparsers.add_parser("tokenizer", help="learn a tokenizer from raw files")
    parser = verb.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "train",
        help="learn a byte-level BPE from raw files",
        description="Learn a byte-level BPE from raw files (.txt, .jsonl, .parquet, also .gz; folders and globs), and "
        "write it as a folder that data.tokenizer in a recipe, and Hugging Face's AutoTokenizer, can open.",
    )
    parser.add_argument("files", nargs="+", metavar="FILES", help="raw files, folders or globs")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens, control tokens included")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the tokenizer is written")
    parser.add_argument("--text", default="text", metavar="COLUMN", help="which field holds the text (default: text)")
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=1_000_000_000,
        metavar="N",
        help="about how much text is learnt from, drawn evenly over all documents (default: 1 GB)",
    )
    parser.add_argument("--on-bad", choices=("stop", "skip"), default="stop", help="what a bad record does")
    parser.add_argument("--force", action="store_true", help="replace the tokenizer that is in FOLDER")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The tokenizer is in its folder, and what it comes to is told: its exit code."""
    from danlu.core.errors import InputError
    from danlu.data.tokenizer import train
    from danlu.files import raw

    out: Path = arguments.out
    _free(out, force=arguments.force)
    if arguments.max_bytes < 1:
        raise InputError(f"--max-bytes {arguments.max_bytes}: at least 1 is needed")
    paths = raw.find(arguments.files, announce=print)
    shards = [path for path in paths if raw.kind_of(path) is None]
    if shards:
        raise InputError(f"{shards[0]} holds tokens, not text; a tokenizer is learnt from raw files")
    size = sum(path.stat().st_size for path in paths)
    share = min(1.0, arguments.max_bytes / max(size, 1))
    if share < 1:
        print(f"The files hold {size:,} bytes: one document in {1 / share:.1f} is learnt from (--max-bytes).")
    texts = Texts(paths, column=arguments.text, share=share, skip=arguments.on_bad == "skip")
    tokenizer = train(texts.read(), vocab_size=arguments.vocab_size)
    tokenizer.save(out)
    files = "file" if len(paths) == 1 else "files"
    print(f"{tokenizer.vocab_size:,} tokens, learnt from {texts.documents:,} documents in {len(paths)} {files}.")
    if texts.bad:
        print(f"Bad records left out: {texts.bad:,}.")
    _tell(tokenizer, texts)
    print(f"Written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}.")
    print(f"To use it, say in a recipe: data: {{tokenizer: {out}}}")
    return 0


def _free(out: Path, *, force: bool) -> None:
    """The folder can be written, and nothing but a tokenizer that may be replaced is in it; asked before the work."""
    from danlu.core.errors import InputError
    from danlu.data.tokenizer import FILES

    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not above.is_dir():
        raise InputError(f"--out {out}: {above} is a file; name a folder")
    if not os.access(above, os.W_OK):
        raise InputError(f"--out {out}: {above} cannot be written to; name another folder")
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if held and not force:
        raise InputError(f"--out {out} holds something already; name a new folder, or say --force to replace it")
    if not set(held) <= set(FILES):
        other = next(name for name in held if name not in FILES)
        raise InputError(f"--out {out} holds more than a tokenizer ({other}), which is not replaced; name a new folder")


class Texts:
    """The texts of raw files, all or an even share of them; counts what it reads and what was bad."""

    def __init__(self, paths: list[Path], *, column: str, share: float, skip: bool) -> None:
        self.paths, self.column, self.share, self.skip = paths, column, share, skip
        self.documents = self.bad = 0

    def read(self) -> Iterator[str]:
        """The texts, in the order of the files; the first bad record is refused, unless they are skipped."""
        self.documents = self.bad = 0
        for path in self.paths:
            yield from self.file(path)

    def file(self, path: Path) -> Iterator[str]:
        """The texts of one file."""
        from danlu.core.errors import InputError
        from danlu.files import raw
        from danlu.files.document import Reject

        for found in raw.read(path, text=self.column):
            if isinstance(found, Reject):
                if not self.skip:
                    raise InputError(f"{found} (--on-bad skip leaves such records out)")
                self.bad += 1
                continue
            # Which documents are drawn depends on where they stand, not on chance: the same command learns the same.
            if zlib.crc32(f"{found.line} {found.text[:1000]}".encode()) < self.share * 2**32:
                self.documents += not found.goes_on
                yield found.text


def _tell(tokenizer: Tokenizer, texts: Texts) -> None:
    """Prints bytes per token, fertility by script, and a line in each of the two commonest scripts, cut into tokens."""
    from danlu.data.tokenizer.fertility import fertility, leading

    sample = [text for path in texts.paths for text in _first(texts.file(path))]
    rows = fertility(tokenizer, sample)
    print(f"{sum(row.size for row in rows) / sum(row.tokens for row in rows):.2f} bytes a token.")
    rows = [row for row in rows if row.words]
    for row in rows[:6]:
        unit = "word" if row.spaced else "character"
        print(
            f"  {row.script:<10} {row.bytes_per_token:5.2f} bytes a token  {row.tokens_per_word:5.2f} tokens a {unit}"
        )
    lines = [line for text in sample for line in text.split("\n") if len(line) > SHOWN]
    for script in [row.script for row in rows[:2]]:
        line = next((line for line in lines if leading(line) == script), "")
        print("  " + "|".join(tokenizer.decode([token]) for token in tokenizer.encode(line)[:SHOWN]))


def _first(texts: Iterator[str]) -> Iterator[str]:
    """The first texts, of about SAMPLE characters together."""
    left = SAMPLE
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
