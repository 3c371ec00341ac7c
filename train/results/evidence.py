"""What recipes have saved, and where it was measured: here, by the commands of docs/results, or in the literature."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """One measured saving of FLOPs, against training from scratch with the same optimizer unless ``against`` says otherwise."""

    recipe: str
    parameters: float
    tokens_per_parameter: float
    saved: float  # a fraction; below 0 where it cost more
    against: str
    source: str
    half_width: float | None = None  # of a 95 % interval over seeds

    def distance(self, parameters: float, tokens_per_parameter: float) -> float:
        """How far from a model and its budget: factors of both, in e-folds."""
        size = abs(math.log(self.parameters / parameters))
        return size + abs(math.log(self.tokens_per_parameter / tokens_per_parameter))

    @property
    def told(self) -> str:
        sure = "" if self.half_width is None else f" ± {100 * self.half_width:.0f}"
        where = f"{_short(self.parameters)} parameters, {self.tokens_per_parameter:.0f} tokens each"
        return f"{100 * self.saved:.0f} %{sure} ({where}, against {self.against}; {self.source})"


def _short(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


OURS = "docs/results"
EVIDENCE = (
    Evidence("muon", 94e3, 20, 0.41, "a tuned AdamW frontier", OURS),
    Evidence("muon", 124e6, 13, 0.33, "tuned Adam, in steps", "modded-nanogpt, 2025"),
    Evidence("deepen", 94e3, 20, 0.147, "a tuned Muon frontier", OURS, 0.045),
    Evidence("deepen", 44.5e3, 20, 0.158, "a tuned Muon frontier", OURS, 0.097),
    Evidence("deepen", 94e3, 20, 0.135, "a tuned AdamW frontier", OURS, 0.159),
    Evidence("deepen", 355e3, 20, 0.162, "a Muon frontier", f"{OURS}; two seeds, 18 and 14 %"),
    Evidence("deepen", 94e3, 50, 0.089, "a tuned Muon frontier", OURS, 0.203),
    Evidence(
        "deepen", 269e3, 11, 0.197, "a Muon frontier", f"{OURS}; a ModernBERT, two seeds; its half alone is cheaper"
    ),
    Evidence("deepen", 692e3, 2.8, 0.128, "a Muon frontier", f"{OURS}; a ViT, two seeds; its half alone is cheaper"),
    Evidence("halves", 94e3, 20, 0.177, "a tuned Muon frontier", OURS, 0.035),
    Evidence("halves", 44.5e3, 20, 0.252, "a tuned Muon frontier", OURS, 0.106),
    Evidence("halves", 163e3, 20, 0.160, "a Muon frontier", f"{OURS}; two seeds, 17 and 15 %"),
    Evidence("halves", 355e3, 20, 0.173, "a Muon frontier", f"{OURS}; two seeds, 12 and 22 %"),
    Evidence("halves", 94e3, 50, 0.062, "a tuned Muon frontier", OURS, 0.077),
    Evidence("halves", 692e3, 2.8, 0.223, "a Muon frontier", f"{OURS}; a ViT, two seeds; its half alone is cheaper"),
    Evidence(
        "halves", 269e3, 11, 0.314, "a Muon frontier", f"{OURS}; a ModernBERT, two seeds; its half alone is cheaper"
    ),
    Evidence("vcycle", 94e3, 20, 0.139, "a tuned Muon frontier", OURS, 0.094),
    Evidence("vcycle", 94e3, 20, 0.079, "a tuned AdamW frontier", OURS, 0.212),
    Evidence("vcycle", 94e3, 50, 0.015, "a tuned Muon frontier", OURS, 0.104),
    Evidence("vcycle", 269e3, 11, 0.208, "an AdamW frontier", f"{OURS}; a ModernBERT, two seeds"),
    Evidence("one layer", 94e3, 20, -0.036, "a tuned Muon frontier", f"{OURS}; one seed"),
    Evidence("one layer", 94e3, 20, 0.318, "AdamW at the loss of 11 tokens each", f"{OURS}; one seed"),
    Evidence("one layer", 7e9, 100, 0.8, "its loss from scratch, within 0.2 %", "Bu, ICML 2026, as reported"),
)


def nearest(recipe: str, parameters: float, tokens_per_parameter: float, count: int = 2) -> list[Evidence]:
    """Of a recipe, what was measured nearest to a model and its budget."""
    known = [e for e in EVIDENCE if e.recipe == recipe]
    return sorted(known, key=lambda e: e.distance(parameters, tokens_per_parameter))[:count]
