"""How are two fine-tuned models interpolated whose configs or vocabularies differ?"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from jaxgrow.axes.names import axis_of
from jaxgrow.checkpoints import Cast, CheckpointError, Interpolated, Source
from jaxgrow.checkpoints.hf.storage import HuggingFace
from jaxgrow.checkpoints.io.files import listed, spelt
from jaxgrow.checkpoints.source import Checkpoint
from jaxgrow.cli.v_cycle_commands import MERGES
from jaxgrow.extras.changed_models import Reconfigured
from jaxgrow.extras.commands.tokenizer_files import tokens_of


class MergedModels(Interpolated):
    """The interpolation of two models of equal layers that get one config and one vocabulary.

    Args:
      before: the first model, A.
      up: the second model, B.
      alpha: the weight of the second model.
      take: whose config decides settings that differ, A or B; None: such settings are an error.
      dtype: the dtype of the result, to which no value is rounded yet.

    Raises:
      CheckpointError: the layers or a setting that decides the function differ, or the vocabularies
        differ and a tokenizer is missing.
    """

    def __init__(
        self,
        before: Checkpoint,
        up: Checkpoint,
        alpha: float,
        take: str | None = None,
        dtype: str | None = None,
    ):
        self._checkpoints = [before, up]
        self._models: list[Source] = [before, up]
        if dtype is not None:
            self._models = [Cast(model, dtype, at_least=True) for model in self._models]
        self._take = take
        self.notes: list[str] = []
        # The checkpoint whose tokenizer and other files the result has.
        self._first = 0
        if type(before.config) is type(up.config) and self._have_equal_leaves("blocks/"):
            self._untie_heads()
            matched = self._match_vocabularies()
            self._take_config(matched)
        super().__init__(self._models[0], self._models[1], alpha)

    @property
    def roots(self) -> tuple[Checkpoint, ...]:
        """The two checkpoints, that with the tokenizer of the result first."""
        return (self._checkpoints[self._first], self._checkpoints[1 - self._first])

    def _have_equal_leaves(self, start: str = "") -> bool:
        """Whether the leaves whose paths begin with ``start`` have the same shapes in both models."""
        one, two = (
            {path: leaf.shape for path, leaf in model.leaves.items() if path.startswith(start)}
            for model in self._models
        )
        return one == two

    def _untie_heads(self) -> None:
        """Give both models a separate head if one of them has one."""
        tied = [model.config.tied for model in self._models]
        i = tied.index(True) if True in tied else 0
        model = self._models[i]
        if tied[0] == tied[1] or model.config.predicts != "tokens":
            return
        head = {"head_kernel": lambda: model.read("token_embedding").T}
        self._models[i] = Reconfigured(model, head, tied=False)
        self.notes.append(
            f"the head of {self._checkpoints[i].folder} is tied, and the other one is not: the "
            "result has an untied head"
        )

    def _match_vocabularies(self) -> bool:
        """Give both models one vocabulary: the larger one. Rows are matched by their tokens.

        If both have the same size, the vocabulary of the model to take is chosen, or else the one with
        more tokens.
        """
        sizes = [model.sizes().get("vocab", 0) for model in self._models]
        tokens = [tokens_of(checkpoint.folder) for checkpoint in self._checkpoints]
        same = sizes[0] == sizes[1]
        if same and (tokens[0] == tokens[1] or not all(tokens)):
            return False
        by_count = len(tokens[1]) > len(tokens[0])
        by_tokens = by_count if self._take is None else self._take == "B"
        self._first = int(by_tokens if same else sizes[1] > sizes[0])
        large, small = self._first, 1 - self._first
        folders = [str(checkpoint.folder) for checkpoint in self._checkpoints]
        if not all(tokens):
            missing = [folder for folder, found in zip(folders, tokens, strict=True) if not found]
            raise CheckpointError(
                f"the two models have layers of equal shapes, but vocabularies of {sizes[0]} and "
                f"{sizes[1]} tokens, whose rows are matched by token. Put the tokenizer.json or the "
                "vocab.json of each model into its folder; both are missing in "
                f"{' and '.join(missing)}"
            )
        at = {token: i for i, token in tokens[small].items() if i < min(sizes)}
        own = {i: token for i, token in tokens[large].items() if i < max(sizes)}
        rows = [(i, at[token]) for i, token in own.items() if token in at]
        if not rows:
            raise CheckpointError(
                f"the tokenizers in {folders[large]} and {folders[small]} have no token in common, "
                "so no row of the embeddings can be merged. Give two models that were trained from "
                "the same one"
            )
        about = f"the vocabularies have {sizes[0]} and {sizes[1]} tokens: the result has the {max(sizes)}"
        if same:
            about = "the two tokenizers give other ids to some tokens: the result has the tokenizer"
        self.notes.append(
            f"{about} of {folders[large]}, and {len(rows)} rows of both models were matched by token"
        )
        if lost := sorted(at.keys() - set(tokens[large].values())):
            gone = listed([spelt(token) for token in lost], most=5)
            self.notes.append(f"these tokens of {folders[small]} are not in the result: {gone}")
        leaves = _matched_leaves(self._models[large], self._models[small], rows)
        self._models[small] = Reconfigured(self._models[small], leaves, vocab=max(sizes))
        return True

    def _take_config(self, matched: bool) -> None:
        """Give both models the config of one of them, with the longer context.

        Args:
          matched: whether the rows of the vocabularies were matched by token. They then belong to
            the tokenizer that was chosen for them.
        """
        configs: list[Any] = [model.config for model in self._models]
        a, b = configs
        names = [f.name for f in fields(a) if f.name not in a.run_by]
        differ = [name for name in names if getattr(a, name) != getattr(b, name)]
        if not differ:
            return
        if not self._have_equal_leaves():
            raise self._differ(differ, "merge models in which they are equal")
        context = {}
        if differ[0] == "context" and getattr(a, "rope_by", None) != "dynamic":
            context = {"context": max(config.context for config in configs)}
            longest = context["context"]
            self.notes.append(f"the context is {longest} tokens, the longer one of the two")
            differ = differ[1:]
        if differ and self._take is None:
            way_out = "choose the config of one model with --take-config A or --take-config B"
            raise self._differ(differ, way_out)
        chosen = configs[self._take == "B"]
        settings = {f.name: getattr(chosen, f.name) for f in fields(chosen)} | context
        self._models = [Reconfigured(model, {}, **settings) for model in self._models]
        if not matched:
            self._first = int(self._take == "B")

    def _differ(self, names: list[str], way_out: str) -> CheckpointError:
        """The error about settings that differ, by their keys in ``config.json``."""
        a, b = self._checkpoints
        about = describe_differences(a, b, names)
        return CheckpointError(
            f"A, {a.folder}, and B, {b.folder}, have layers of equal shapes, but cannot be merged: "
            f"{listed(about, most=5)}; {way_out}"
        )


def describe_differences(a: Checkpoint, b: Checkpoint, names: list[str]) -> list[str]:
    """Describe settings that differ between two models, by their keys in ``config.json``."""
    fields_of = a.family.fields if isinstance(a, HuggingFace) else {}
    keys = {own: key for key, own in fields_of.items()}
    mine, theirs = a.config.as_json(), b.config.as_json()
    return [
        f"{keys.get(name, name)} is {spelt(mine.get(name))} in A and {spelt(theirs.get(name))} in B"
        for name in names
    ]


def _matched_leaves(
    large: Source, small: Source, rows: list[tuple[int, int]]
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that return the leaves of the small model with the rows of the large vocabulary.

    Args:
      large: the model whose rows other tokens have.
      small: the small model.
      rows: the indices of each token in both models.
    """
    into, of = np.array(rows, int).reshape(-1, 2).T

    def matched(path: str, along: int) -> np.ndarray:
        out = np.array(large.read(path))
        np.moveaxis(out, along, 0)[into] = np.moveaxis(small.read(path), along, 0)[of]
        return out

    return {
        path: lambda path=path, along=along: matched(path, along)
        for path, leaf in small.leaves.items()
        for along, name in enumerate(leaf.names)
        if axis_of(name) == "vocab"
    }


def merge_models(
    before: Checkpoint, up: Checkpoint, alpha: float, take: str | None, dtype: str | None
) -> tuple[MergedModels, list[str]]:
    """Merge two models. Return the merged model, and notes about their differences."""
    merged = MergedModels(before, up, alpha, take, dtype)
    return merged, merged.notes


MERGES.add("fine-tunes", merge_models)
