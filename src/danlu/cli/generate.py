"""`danlu generate`: a model goes on with a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from danlu.core.errors import InputError

if TYPE_CHECKING:
    from danlu.data.tokenizer import Tokenizer
    from danlu.generate.engine import Ask
    from danlu.models.stack import Trunk

NEW_TOKENS = 200


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    parser = subparsers.add_parser(
        "generate",
        help="go on with a text",
        description="Go on with a text, with the model of a run (its model/) or of a Hugging Face folder. The text and "
        "what follows it go to standard output as they come.",
    )
    parser.add_argument("model", metavar="RUN_OR_FOLDER", help="a run's folder, or a Hugging Face folder")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to go on with")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the file that holds it (UTF-8); -: standard input")
    parser.add_argument(
        "--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=f"tokens to add at most ({NEW_TOKENS})"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="below 1 surer, above 1 wilder, 0 greedy (1.0)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most probable tokens; 0: all (0)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="only the fewest tokens of probability P together (1.0)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same text (0)")
    parser.add_argument("--tokenizer", metavar="PATH", help="byte, or a path, where the folder holds no tokenizer")
    parser.add_argument("--no-cache", action="store_true", help="read everything again at each token: slower, the same")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The text and what follows it stand on standard output; how fast it went, on standard error."""
    text = _prompt(arguments)
    folder = _folder(Path(arguments.model))

    from danlu.generate.pick import Pick

    pick = Pick(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p)
    if arguments.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, not {arguments.max_new_tokens}.")

    from danlu.data import tokenizer as tokenizers
    from danlu.models.families import check_vocabulary, read_config

    family = read_config(folder)  # what is wrong shows before the weights are read
    source = arguments.tokenizer or folder
    tokenizer = tokenizers.load(source)
    check_vocabulary(family, tokenizer.vocab_size, tokenizer=str(source))
    ids = [*tokenizer.begin, *tokenizer.encode(text)]
    limit = family.shape().max_positions
    if not ids:
        raise InputError("The prompt is empty: give at least one character to go on with.")
    if len(ids) >= limit:
        raise InputError(
            f"The prompt is {len(ids)} tokens long, but the model reads {limit} with what it adds: shorten the prompt."
        )
    new = min(arguments.max_new_tokens, limit - len(ids))
    if new < arguments.max_new_tokens:
        print(f"Adding at most {new} tokens: the model reads {limit}, the prompt takes {len(ids)}.", file=sys.stderr)

    from danlu.generate.engine import Ask

    ask = Ask(
        max_new_tokens=new,
        limit=limit,
        vocabulary=tokenizer.vocab_size,
        end=_ends(folder, tokenizer),
        pick=pick,
        seed=arguments.seed,
        cached=not arguments.no_cache,
    )
    _write(folder, tokenizer, text, ids, ask)
    return 0


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        return str(arguments.prompt)
    try:
        content = sys.stdin.buffer.read() if arguments.prompt_file == "-" else Path(arguments.prompt_file).read_bytes()
    except OSError as error:
        raise InputError(f"--prompt-file {arguments.prompt_file} cannot be read: {error.strerror}.") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"--prompt-file {arguments.prompt_file} is not UTF-8: line {line}, byte {error.start} of the file."
        ) from None


def _folder(path: Path) -> Path:
    """The folder with config.json: the path, or a run's model/; a run that has none yet is told apart."""
    from danlu.core.paths import RunFolder

    if not path.exists():
        raise InputError(f"There is no folder {path}: give a run's folder or a Hugging Face folder.")
    if not path.is_dir():
        raise InputError(f"{path} is a file: give a run's folder or a Hugging Face folder.")
    run = RunFolder(path)
    if run.recipe.is_file() and not (run.model / "config.json").is_file():
        raise InputError(
            f"{path} has no model/ yet, which a run writes when it ends: go on with danlu train {run.recipe}"
        )
    from danlu.models.families import model_folder

    return model_folder(path)


def _ends(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """Ids after which the text has ended: the tokenizer's, and those that the folder says to generate with."""
    import json

    ends = {tokenizer.eos_id}
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
            raise InputError(f"{folder / name} is no table of settings: {error}.") from None
        for token in said if isinstance(said, list) else [said]:
            if isinstance(token, int):
                ends.add(token)
    return ends


def _write(folder: Path, tokenizer: Tokenizer, text: str, ids: list[int], ask: Ask) -> None:
    """The text and its continuation stand on standard output, each token as it comes."""
    import time

    from danlu.core import device as devices
    from danlu.core.contracts import Head
    from danlu.generate.engine import generate
    from danlu.generate.text import Text

    device = devices.choose()
    model = _model(folder).to(device)
    pieces = Text(tokenizer.decode, before=ids, hidden=set(tokenizer.control.values()))
    sys.stdout.write(text)
    sys.stdout.flush()
    start, count = time.monotonic(), 0
    for (token,) in generate(model, cast(Head, model.heads["language"]), [ids], ask, device=device):
        assert token is not None
        count += 1
        sys.stdout.write(pieces.add(token))
        sys.stdout.flush()
    sys.stdout.write(pieces.finish() + "\n")
    sys.stdout.flush()
    seconds = time.monotonic() - start
    print(f"{count} tokens in {seconds:.1f} s ({count / max(seconds, 1e-9):,.0f} a second)", file=sys.stderr)


def _model(folder: Path) -> Trunk:
    """The model with its weights; halves are computed in fp32 where the device cannot do them well."""
    import torch

    from danlu.core import device as devices
    from danlu.models import weights

    dtype = weights.stored_dtype(folder)
    if dtype == torch.float16 and devices.choose().type == "cpu":
        dtype = torch.float32
    _, model = weights.restore(folder, dtype=dtype)
    return model.eval()
