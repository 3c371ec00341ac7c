"""Continues texts by a model: ``python -m train.generate MODEL --prompt "Once upon a time" [--temperature .8 --top-p .95]``

MODEL is the folder of a finished run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face folder of a decoder: GPT-2,
Llama, Qwen2, Qwen3, Mistral, Mixtral, Gemma, Gemma 2, Gemma 3, OLMo 2, Phi-3, SmolLM 3 or Pythia.

Without ``--temperature`` the likeliest token is taken each time; with it, tokens are drawn, and ``--samples`` continues each
prompt several times. A text goes on until the model ends it, for ``--max-new`` tokens, or until prompt and new tokens fill the
model's context. The same command gives the same texts.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxgrow import generate
from train.commands import Parser
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
    parser = Parser("generate", __doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        required=True,
        metavar="TEXT",
        help="texts to continue; -: each line of stdin is a prompt",
    )
    parser.add_argument("--max-new", type=int, default=200, metavar="N", help="most new tokens of each text")
    parser.add_argument(
        "--temperature",
        type=float,
        help="sample tokens; values below 1 prefer likely tokens (default: take the likeliest token)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="N", help="sample from the N likeliest tokens (default: from all tokens)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens with total probability P (default: from all tokens)",
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="continuations of each prompt")
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling")
    parser.add_argument("--tokenizer", help="tokenizer.json, a folder, or bytes (default: that of MODEL)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each sample")
    a = parser.parse_args()
    prompts = [line for text in a.prompt for line in (_stdin() if text == "-" else [_checked(text)])]
    if not prompts:
        raise UserError("--prompt -: no line came in")
    settings = {name: getattr(a, name) for name in ("max_new", "temperature", "top_k", "top_p", "seed")}
    for sample in samples(a.model, prompts, a.samples, a.tokenizer, **settings):
        print(json.dumps(sample) if a.json else sample["text"])


def _stdin() -> list[str]:
    try:
        return sys.stdin.read().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: the lines are not UTF-8 ({error}); convert them, such as by iconv") from error


def _checked(prompt: str) -> str:
    """The prompt of a command line, which must be UTF-8: Python keeps other bytes as surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"--prompt {prompt!r} is not UTF-8; convert it, such as by iconv") from None
    return prompt


if __name__ == "__main__":
    exits_cleanly(main)
