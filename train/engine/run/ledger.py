"""The cost of a run so far: tokens, FLOPs and seconds, in total and by phase."""

import time
from contextlib import contextmanager
from typing import Any

import jax


class Ledger:
    """Counters over all phases and per phase; ``compile_seconds`` are contained in ``seconds``.

    Validation is a measurement and not a cost, so its time and its compilation time are not
    counted.

    Args:
      record: return value of `record` from the time of a checkpoint; counting continues from it.
    """

    def __init__(self, record: dict[str, Any] | None = None):
        begun = {
            "tokens": 0,
            "flops": 0.0,
            "seconds": 0.0,
            "compile_seconds": 0.0,
            "steps": 0,
            "phases": [],
        }
        # Old records do not contain compile_seconds.
        record = begun | (record or {})
        self.tokens, self.flops, self.steps = record["tokens"], record["flops"], record["steps"]
        self.phases: list[dict[str, Any]] = [{"compile_seconds": 0.0} | p for p in record["phases"]]
        self._before, self._start = record["seconds"], time.monotonic()
        self._compiled, self._compiling = record["compile_seconds"], Compiling()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    @property
    def compile_seconds(self) -> float:
        return self._compiled + self._compiling.seconds

    @contextmanager
    def paused(self):
        """Do not count the time that is spent inside of the block."""
        before, compiled = self.seconds, self.compile_seconds
        yield
        self._before, self._start = before, time.monotonic()
        self._compiled = compiled - self._compiling.seconds

    def begin(self, phase: str, kind: str, model: str, parameters: int) -> None:
        """Close the account of the previous phase and open one for the next phase.

        Args:
          phase: label of the phase.
          kind: kind of the phase.
          model: name of the model that the phase makes or trains.
          parameters: number of parameters of this model.
        """
        self._settle()
        self.phases.append(
            {"phase": phase, "kind": kind, "model": model, "parameters": parameters}
            | {
                "steps": 0,
                "tokens": 0,
                "flops": 0.0,
                "seconds": 0.0,
                "compile_seconds": 0.0,
                "layers": 0.0,
            }
        )

    def add(self, *, flops: float, tokens: int = 0, steps: int = 0, layers: float = 0.0) -> None:
        """Add costs to the totals and to the current phase.

        Args:
          flops: FLOPs.
          tokens: tokens.
          steps: steps.
          layers: number of layers that were run, summed over the steps.
        """
        self.flops, self.tokens, self.steps = (
            self.flops + flops,
            self.tokens + tokens,
            self.steps + steps,
        )
        account = self.phases[-1]
        account["flops"] += flops
        account["tokens"] += tokens
        account["steps"] += steps
        account["layers"] += layers

    def charge(self, seconds: float, compile_seconds: float) -> None:
        """Add the time of an earlier run to the current phase.

        Args:
          seconds: total time in seconds.
          compile_seconds: the part of it that was compilation, in seconds.
        """
        self._before += seconds
        self._compiled += compile_seconds

    def totals(self) -> dict[str, float]:
        spent = {
            "seconds": round(self.seconds, 3),
            "compile_seconds": round(self.compile_seconds, 3),
        }
        return {"steps": self.steps, "tokens": self.tokens, "flops": self.flops} | spent

    def record(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue counting, as JSON."""
        self._settle()
        return {
            "tokens": self.tokens,
            "flops": self.flops,
            "seconds": sum(p["seconds"] for p in self.phases),
            "compile_seconds": sum(p["compile_seconds"] for p in self.phases),
            "steps": self.steps,
            "phases": [dict(p) for p in self.phases],
        }

    def _settle(self) -> None:
        """Assign the time that no earlier phase used to the current phase."""
        if self.phases:
            for unit, total in (
                ("seconds", self.seconds),
                ("compile_seconds", self.compile_seconds),
            ):
                self.phases[-1][unit] = total - sum(p[unit] for p in self.phases[:-1])

    def close(self) -> None:
        self._compiling.close()


class Compiling:
    """Seconds of tracing, lowering and compiling since the object was created.

    A trace inside of another trace is counted once.
    """

    def __init__(self):
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []  # (begin, seconds), in order
        jax.monitoring.register_event_duration_secs_listener(self._ended)

    def _ended(self, event: str, duration_secs: float, **_: Any) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        begin = time.monotonic() - duration_secs
        while self._spans and self._spans[-1][0] >= begin:
            self.seconds -= self._spans.pop()[1]
        self._spans.append((begin, duration_secs))
        self.seconds += duration_secs

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._ended)
