"""Continue texts with a model:

``python -m train.generate MODEL --prompt "Once upon a time" [--temperature .8 --top-p .95]``

MODEL is the folder of a run, an Orbax folder that ``jaxgrow`` wrote, or a Hugging Face
folder of a decoder: GPT-2, Llama, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Mistral, Mixtral, Gemma,
Gemma 2, Gemma 3, OLMo, OLMo 2, OLMo 3, OLMoE, Phi-3, SmolLM 3, GPT-NeoX (Pythia), OPT, Granite, a
dense Granite 4 or gpt-oss.

Without ``--temperature`` the most likely token is taken each time. With it, tokens are sampled, and
``--samples`` continues each prompt several times. A text ends at an end token of the model, before
a string of ``--stop``, after ``--max-new`` tokens, or when the prompt and the new tokens fill the
context of the model. ``--chat`` puts each prompt into the chat template of the model, and prints
the answer. The same command gives the same texts. The last line, on stderr, shows the compilation
time and the generation time. Each range of prompt lengths is compiled once. Control characters are
printed as ``\\x1b``; the texts of ``--json`` are exact.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrow.extras.models.generation import generate
from jaxgrow.typed import Json
from train.arguments import command_parser
from train.common.errors import UserError, exits_cleanly
from train.common.output import say
from train.extras.evaluation.chat import render_chat
from train.extras.evaluation.stopping import Stopping
from train.extras.pretrained import TextModel, open_text_model
from train.extras.tokenizers.special import added_tokens
from train.plan.ledger import Compiling

SETTINGS = ("max_new", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclass(frozen=True)
class Asked:
    """How prompts are encoded, and when a text ends.

    Args:
      count: number of continuations of each prompt.
      stop: strings that end a text. They are not part of the text.
      chat: whether prompts are user messages, which are put into the chat template of the model.
      cut: whether to remove the beginning of a prompt that does not fit into the context.
      stream: function that receives each new part of the text, if there is only one text.
    """

    count: int = 1
    stop: Sequence[str] = ()
    chat: bool = False
    cut: bool = False
    stream: Callable[[str], object] | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of compilation and of generation, and the number of new tokens of all texts."""

    compiling: float
    generating: float
    tokens: int

    def __str__(self) -> str:
        rate = f", {self.tokens / self.generating:.1f} tokens/s" if self.generating > 0 else ""
        return f"compiled in {self.compiling:.1f} s; generated {self.tokens:,} tokens in {self.generating:.1f} s{rate}"


def sample_texts(
    folder: Path,
    prompts: Sequence[str],
    asked: Asked,
    tokenizer: str | None = None,
    **settings: Any,
) -> tuple[list[Json], Timing]:
    """Continue each prompt ``asked.count`` times.

    Args:
      folder: folder of the model.
      prompts: texts to continue.
      asked: how prompts are encoded, and when a text ends.
      tokenizer: tokenizer of the model, as for `train.extras.pretrained.open_text_model`.
      **settings: settings of `jaxgrow.extras.models.generation.generate`.

    Returns:
      The samples and the time of generation. A sample has ``prompt``, ``text`` (prompt and
      continuation, or the answer in a chat), ``tokens`` (the number of new tokens) and ``ended``
      (whether the model or a stop string ended the text).

    Raises:
      UserError: the model does not continue text, or a prompt or a setting is not valid.
    """
    model = open_text_model(folder, tokenizer)
    texts = [prompt for prompt in prompts for _ in range(asked.count)]
    rows = [_encode_prompt(model, prompt, asked, settings["max_new"]) for prompt in texts]
    stopping = Stopping(model.tokenizer, asked.stop, rows)
    watch = _Watch(stopping, asked.stream)
    watched = asked.stop or asked.stream
    found, seconds, compiling = _timed(model, rows, watch if watched else None, settings)
    out = []
    for row, (prompt, new) in enumerate(zip(texts, found, strict=True)):
        kept = stopping.tokens(new, row)
        answer = stopping.text(kept, row)
        watch.show(answer)
        text = answer if asked.chat else model.tokenizer.decode(rows[row]) + answer
        ended = kept[-1] in model.special.ends or stopping.watch(row, kept)
        out.append({"prompt": prompt, "text": text, "tokens": len(kept), "ended": bool(ended)})
    return out, Timing(
        compiling, max(0.0, seconds - compiling), sum(sample["tokens"] for sample in out)
    )


def _encode_prompt(model: TextModel, prompt: str, asked: Asked, max_new: int) -> list[int]:
    """Return the tokens of a prompt.

    If ``asked.cut`` is set, the prompt is cut to leave space for ``max_new`` tokens, but at most
    for half of the context.
    """
    if asked.chat:
        text = render_chat(model.special, [{"role": "user", "content": prompt}])
        begin = []
        tokens = model.texts.encode_one(text, control=True)
    else:
        begin = added_tokens(model.tokenizer)[0]
        tokens = model.texts.encode_one(prompt, framed=True)
    length = model.config.length
    if len(tokens) < length:
        return tokens
    if not asked.cut:
        raise UserError(
            f"a prompt has {len(tokens)} tokens, which leaves no room in the model's context of "
            f"{length}: shorten it, or remove its beginning with --cut"
        )
    room = max(1, length - min(max_new, length // 2) - len(begin))
    return [*begin, *tokens[-room:]]


class _Watch:
    """Prints the text during generation, and ends it at a stop string."""

    def __init__(self, stopping: Stopping, stream: Callable[[str], object] | None):
        self.stopping = stopping
        self.stream = stream
        self.shown = ""

    def __call__(self, row: int, tokens: np.ndarray) -> bool:
        self.show(self.stopping.settled(tokens, row))
        return self.stopping.watch(row, tokens)

    def show(self, text: str) -> None:
        if self.stream is not None:
            self.stream(text[len(self.shown) :])
            self.shown = text


def _timed(
    model: TextModel, rows: list[list[int]], watch: _Watch | None, settings: Json
) -> tuple[list[np.ndarray], float, float]:
    """Return the new tokens of each row, the total seconds, and the seconds of compilation."""
    began = time.monotonic()
    compiling = Compiling()
    try:
        with jax.set_mesh(model.mesh):
            found = generate(
                model.config, model.params, rows, end=model.special.ends, watch=watch, **settings
            )
    except ValueError as error:
        raise UserError(str(error)) from error
    finally:
        compiling.close()
    return found, time.monotonic() - began, compiling.seconds


def main() -> None:
    a = command_parser("generate").parse_args()
    prompts = []
    for text in a.prompt:
        prompts += _stdin() if text == "-" else [_check_prompt(text)]
    if not prompts:
        raise UserError("--prompt -: stdin has no lines; write one prompt in each line")
    if a.stream and len(prompts) > 1:
        raise UserError("--stream prints one text while it is generated: give one --prompt")
    asked = Asked(a.samples, a.stop, a.chat, a.cut, _printed if a.stream else None)
    if a.stream and not a.chat:
        _printed(prompts[0])
    found, timing = sample_texts(
        a.model, prompts, asked, a.tokenizer, **{name: getattr(a, name) for name in SETTINGS}
    )
    if a.stream:
        say("")
    else:
        for sample in found:
            say(json.dumps(sample) if a.json else sample["text"])
    say(timing, file=sys.stderr)


def _printed(text: str) -> None:
    say(text, end="", flush=True)


def _stdin() -> list[str]:
    try:
        # `str.splitlines` would also split at form feeds and at U+2028.
        return [line.removesuffix("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt -: the lines are not UTF-8 ({error}); convert them, such as with iconv"
        ) from error


def _check_prompt(prompt: str) -> str:
    """Raise an error for a prompt that is not UTF-8. Python keeps its other bytes as surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--prompt {prompt!r} is not UTF-8; convert it, such as with iconv"
        ) from None
    return prompt


if __name__ == "__main__":
    exits_cleanly(main)
