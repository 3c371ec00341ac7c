"""Models of ours in the lm-evaluation-harness (``pip install -e '.[eval]'``), with any of its tasks.

    import lm_eval
    from train.tasks.harness import Harness

    lm_eval.simple_evaluate(Harness("runs/vcycle"), tasks=["lambada_openai"])

Its tasks read their data from a hub; ``lm_eval.tasks.TaskManager(include_path=...)`` takes settings of those that read local
files.
"""

from pathlib import Path
from typing import Any

from lm_eval.api.model import LM  # type: ignore[import-not-found]

from jaxgrow.generation import generate
from train.state.opened import opened
from train.tasks.scoring import Scorer


class Harness(LM):
    """The model of a folder, as of `train.state.opened.opened`."""

    def __init__(self, folder: str | Path, tokenizer: str | None = None):
        super().__init__()
        self.model = opened(folder, tokenizer)
        self.scorer = Scorer(self.model, progress=True)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        scores = self.scorer([self.scorer.continuation(*request.args) for request in requests])
        return [(-score.loss, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        windows = [self.scorer.windows(request.args[0]) for request in requests]
        scores = iter(self.scorer([window for text in windows for window in text]))
        return [-sum(next(scores).loss for _ in text) for text in windows]

    def generate_until(self, requests: list[Any]) -> list[str]:
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        """Up to the first of the texts that end it, or the model's own end."""
        length, until = self.model.config.length, settings.get("until", [])
        new = min(settings.get("max_gen_toks", 256), length - 1)
        prompt = self.scorer.encode(context)[new - length :] or [self.scorer.begin or 0]
        draws = {"temperature": 1.0, **settings} if settings.get("do_sample") else {}
        [tokens] = generate(
            self.model.config,
            self.model.params,
            [prompt],
            max_new=new,
            temperature=draws.get("temperature"),
            top_k=draws.get("top_k"),
            top_p=draws.get("top_p"),
            end=self.scorer.end,
        )
        text = self.model.tokenizer.decode(list(map(int, tokens)))
        for end in [until] if isinstance(until, str) else until:
            text = text.split(end)[0]
        return text
