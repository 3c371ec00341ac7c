"""The progress bar of a run."""

from typing import Any

from tqdm import tqdm


class Progress:
    """A bar in FLOPs, so that the time left is right for small and large models alike; none where nobody looks."""

    def __init__(self, total: float, done: float):
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self._bar = tqdm(total=total, initial=done, disable=None, bar_format=form)
        self._first: dict[str, Any] | None = None  # what the run had cost at the phase's first line

    def phase(self, name: str) -> None:
        self._first = None
        self._bar.set_description_str(name)

    def show(self, step: int, totals: dict[str, Any], loss: float) -> None:
        """``totals``: what the run had cost at ``step``. The speed is since the phase's first line, without compiling."""
        self._bar.n = totals["flops"]
        self._first = self._first or totals
        spent = {unit: totals[unit] - self._first[unit] for unit in ("tokens", "seconds", "compile_seconds")}
        tokens, seconds = spent["tokens"], spent["seconds"] - spent["compile_seconds"]
        speed = f", {tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        self._bar.set_postfix_str(f"step {step}, loss {loss:.3f}{speed}")

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
