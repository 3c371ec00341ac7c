"""The cost of a run so far: tokens, FLOPs and seconds, in total and by phase."""

import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace

import jax

from train.plan.record import Account, CostRecord


class Ledger:
    """Counters over all phases and per phase; ``compile_seconds`` are contained in ``seconds``.

    Validation and checkpoints are not a cost of the method, so their time and their compilation
    time are counted separately, in ``uncounted``.

    Args:
      record: costs at the time of a checkpoint; counting continues from it.
    """

    def __init__(self, record: CostRecord | None = None):
        record = record or CostRecord()
        self.tokens = record.tokens
        self.flops = record.flops
        self.steps = record.steps
        self.source_tokens = dict(record.source_tokens)
        self.uncounted = dict(record.uncounted)
        self.phases = _copies(record.phases)
        self._before = record.seconds
        self._start = time.monotonic()
        self._compiled = record.compile_seconds
        self._compiling = Compiling()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    @property
    def compile_seconds(self) -> float:
        return self._compiled + self._compiling.seconds

    @contextmanager
    def paused(self, reason: str):
        """Add the time that is spent inside of the block only to ``uncounted[reason]``."""
        before = self.seconds
        compiled = self.compile_seconds
        yield
        self.uncounted[reason] = self.uncounted.get(reason, 0.0) + self.seconds - before
        self._before = before
        self._start = time.monotonic()
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
        self.phases.append(Account(phase, kind, model, parameters))

    def add(
        self,
        *,
        flops: float,
        tokens: int = 0,
        steps: int = 0,
        layers: float = 0.0,
        source_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Add costs to the totals and to the current phase.

        Args:
          flops: FLOPs.
          tokens: tokens.
          steps: steps.
          layers: number of layers that were run, summed over the steps.
          source_tokens: tokens of each source of a mixture.
        """
        for total in (self, self.phases[-1]):
            for name, count in (source_tokens or {}).items():
                total.source_tokens[name] = total.source_tokens.get(name, 0) + count
            total.flops += flops
            total.tokens += tokens
            total.steps += steps
        self.phases[-1].layers += layers

    @property
    def skipped(self) -> int:
        """Number of steps whose update was left out. Their cost is counted like that of others."""
        return sum(account.skipped for account in self.phases)

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
        sources = {f"tokens/{name}": count for name, count in self.source_tokens.items()}
        return {"steps": self.steps, "tokens": self.tokens, "flops": self.flops} | spent | sources

    def record(self) -> CostRecord:
        """Return the state that a resumed run needs to continue counting."""
        self._settle()
        return CostRecord(
            self.tokens,
            self.flops,
            sum(account.seconds for account in self.phases),
            sum(account.compile_seconds for account in self.phases),
            self.steps,
            dict(self.source_tokens),
            _copies(self.phases),
            uncounted=dict(self.uncounted),
        )

    def _settle(self) -> None:
        """Assign the time that no earlier phase used to the current phase."""
        if not self.phases:
            return
        *earlier, current = self.phases
        current.seconds = self.seconds - sum(account.seconds for account in earlier)
        current.compile_seconds = self.compile_seconds - sum(
            account.compile_seconds for account in earlier
        )

    def close(self) -> None:
        self._compiling.close()


def _copies(accounts: Iterable[Account]) -> list[Account]:
    return [replace(account, source_tokens=dict(account.source_tokens)) for account in accounts]


class Compiling:
    """Seconds of tracing, lowering and compiling since the object was created.

    A trace inside of another trace is counted once.
    """

    def __init__(self):
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []  # (begin, seconds), in order
        jax.monitoring.register_event_duration_secs_listener(self._ended)

    def _ended(self, event: str, duration_secs: float, **_: object) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        begin = time.monotonic() - duration_secs
        while self._spans and self._spans[-1][0] >= begin:
            self.seconds -= self._spans.pop()[1]
        self._spans.append((begin, duration_secs))
        self.seconds += duration_secs

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._ended)
