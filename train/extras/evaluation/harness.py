"""Models in the lm-evaluation-harness (``pip install -e '.[eval]'``), for any of its tasks.

`train.evaluate` uses it. From Python::

    import lm_eval
    from train.extras.evaluation.harness import Harness

    lm_eval.simple_evaluate(Harness("runs/vcycle"), tasks=["lambada_openai"])

Texts are tokenised as the harness tokenises them for a model of `transformers`. A masked model
scores a continuation by its pseudo-likelihood (`train.extras.evaluation.scoring`).
"""

from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-not-found]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found]

from jaxgrow.extras.models.generation import generate
from train.common.errors import UserError
from train.extras.evaluation.scoring import Scorer
from train.extras.evaluation.stopping import Stopping
from train.extras.pretrained import TextModel, open_text_model


class Harness(TemplateLM):
    """A model for `lm_eval.simple_evaluate`.

    Args:
      model: a model, or its folder, as for `train.extras.pretrained.open_text_model`.
      tokenizer: as for `train.extras.pretrained.open_text_model`.
    """

    def __init__(self, model: str | Path | TextModel, tokenizer: str | None = None):
        super().__init__()
        self.model = model if isinstance(model, TextModel) else open_text_model(model, tokenizer)
        self.scorer = Scorer(self.model, progress=True)

    @property
    def eot_token_id(self) -> int | None:
        return self.model.special.end

    @property
    def prefix_token_id(self) -> int | None:
        return self.model.special.begin

    @property
    def max_length(self) -> int:
        return self.model.config.length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The tokens of a text.

        By default, the tokens that the tokenizer adds are included, unless the text begins with the
        first of them.
        """
        if add_special_tokens is None:
            begin = (
                None
                if self.prefix_token_id is None
                else self.model.tokenizer.id_to_token(self.prefix_token_id)
            )
            add_special_tokens = not self.scorer.masked and not (begin and string.startswith(begin))
        # Its tasks write control tokens into their texts, and published numbers count them as such.
        return self.model.texts.encode_one(string, framed=add_special_tokens, control=True)

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        if not self.scorer.masked:
            return super().loglikelihood(requests, disable_tqdm)
        pairs = [
            self._encode_pair(*request.args) if request.args[0] else ([], None)
            for request in requests
        ]
        return self._loglikelihood_tokens(
            [
                (
                    request.args,
                    context,
                    self.tok_encode(request.args[1]) if tokens is None else tokens,
                )
                for request, (context, tokens) in zip(requests, pairs, strict=True)
            ]
        )

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        scores = self.scorer(
            [self.scorer.after(context, tokens) for _, context, tokens in requests]
        )
        return [(-score.loss, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        if self.scorer.masked:
            raise UserError(
                "a masked model has no perplexity of running text; evaluate it on a task of pairs or choices, such as blimp"
            )
        windows = [self._windows(request.args[0]) for request in requests]
        asked = [(None, *window) for text in windows for window in text]
        scores = iter(self._loglikelihood_tokens(asked))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """``(context, tokens to score)`` of each window of a text."""
        rolling = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, 1
        )
        return list(map(make_disjoint_window, rolling))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        # A task may ask for several samples of one prompt, so each request has a seed of its own.
        return [self._generated(i, *request.args) for i, request in enumerate(requests)]

    def _generated(self, seed: int, context: str, given: dict[str, Any]) -> str:
        """The generated text up to the first stop string, or to the end of text.

        The end of a long prompt is kept. If the new tokens would fill the context, the prompt has
        half of it; the harness refuses models of `transformers` then.
        """
        settings = normalize_gen_kwargs(given)
        new = n if (n := settings["max_gen_toks"]) < self.max_length else self.max_length // 2
        prompt = self.tok_encode(context)[new - self.max_length :] or [self.prefix_token_id or 0]
        heat = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
        draws = settings if heat else {}
        stopping = Stopping(self.model.tokenizer, settings["until"])
        [tokens] = generate(
            self.model.config,
            self.model.params,
            [prompt],
            max_new=new,
            temperature=heat or None,
            top_k=draws.get("top_k") or None,
            top_p=draws.get("top_p"),
            min_p=draws.get("min_p"),
            repetition_penalty=settings.get("repetition_penalty"),
            seed=seed,
            end=self.model.special.ends,
            watch=stopping.watch if stopping.strings else None,
        )
        return stopping.text(tokens)
