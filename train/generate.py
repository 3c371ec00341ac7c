"""Continues texts by a model: ``python -m train.generate MODEL --prompt "Once upon a time" [--temperature .8 --top-p .95]``

MODEL is the folder of a finished run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face folder: a GPT-2, a Llama or a
Qwen2.

Without ``--temperature`` the likeliest token is taken each time; with it, tokens are drawn, and ``--samples`` continues each
prompt several times. A text goes on until the model ends it, for ``--max-new`` tokens, or until prompt and new tokens fill the
model's context. The same command gives the same texts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxgrow import generate
from train.data.text import end_of_text
from train.errors import UserError, exits_cleanly
from train.state.opened import opened


def samples(
    folder: Path, prompts: Sequence[str], count: int, tokenizer: str | None = None, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Each prompt, continued ``count`` times; ``settings`` as of `jaxgrow.generate`.

    Returns:
      For each sample ``prompt``, ``text`` (prompt and continuation), ``tokens`` (how many are new) and ``ended`` (whether the
      model ended the text).

    Raises:
      UserError: the model does not continue text, or a prompt or a setting is none that it takes.
    """
    if count < 1:
        raise UserError(f"--samples is {count}, less than 1")
    if count > 1 and settings.get("temperature") is None:
        raise UserError(f"--samples {count}: the likeliest tokens are the same each time; give --temperature, as 1")
    model = opened(folder, tokenizer)
    end = end_of_text(model.tokenizer)
    rows = [(prompt, model.tokenizer.encode(prompt).ids) for prompt in prompts for _ in range(count)]
    try:
        with jax.set_mesh(model.mesh):
            found = generate(model.config, model.params, [tokens for _, tokens in rows], end=end, **settings)
    except ValueError as error:
        raise UserError(str(error)) from error
    for (prompt, tokens), new in zip(rows, found, strict=True):
        ended = end is not None and new[-1] == end
        text = model.tokenizer.decode([*tokens, *new.tolist()])
        yield {"prompt": prompt, "text": text, "tokens": len(new), "ended": bool(ended)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument(
        "--prompt", nargs="+", action="extend", required=True, metavar="TEXT", help="-: each line that comes in"
    )
    parser.add_argument("--max-new", type=int, default=200, metavar="N", help="tokens of a continuation (default: 200)")
    parser.add_argument("--temperature", type=float, help="draws tokens; less than 1: likely ones more often")
    parser.add_argument("--top-k", type=int, metavar="N", help="draws from the likeliest tokens alone")
    parser.add_argument("--top-p", type=float, metavar="P", help=".. from those that have this probability together")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="tokenizer.json, a folder, or bytes, where MODEL has none")
    parser.add_argument("--json", action="store_true", help="prints a JSON object a sample")
    a = parser.parse_args()
    prompts = [line for text in a.prompt for line in (sys.stdin.read().splitlines() if text == "-" else [text])]
    if not prompts:
        raise UserError("--prompt -: no line came in")
    settings = {name: getattr(a, name) for name in ("max_new", "temperature", "top_k", "top_p", "seed")}
    for sample in samples(a.model, prompts, a.samples, a.tokenizer, **settings):
        print(json.dumps(sample) if a.json else sample["text"])


if __name__ == "__main__":
    exits_cleanly(main)
