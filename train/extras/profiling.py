"""How are some steps of a run traced, so that tools show what the devices did?"""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxgrow.axes import Tree
from train.run.trainer import TRACES

# These first steps are not traced, because they compile and fill the queues of the devices.
FIRST = 3


class Profile:
    """A trace of some steps of a run, for xprof and Perfetto.

    Args:
      steps: number of steps of this process to trace, after the first `FIRST` steps; 0 disables it.
      folder: folder that the trace is written to.
      say: function that prints the line with the location of the trace.
    """

    def __init__(self, steps: int, folder: Path, say: Callable[[str], None]):
        self._steps = steps
        self._folder = folder
        self._say = say
        self._done = 0
        self._tracing = False

    def step(self, results: Tree) -> None:
        """Count one step, and start or stop the trace when its turn has come.

        Args:
          results: outputs of the step that has just been dispatched. The trace starts and stops
            after they are computed.
        """
        self._done += 1
        if not self._steps or not FIRST <= self._done <= FIRST + self._steps:
            return
        jax.block_until_ready(results)
        if self._done == FIRST:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True
        elif self._done == FIRST + self._steps:
            self.close()

    def close(self) -> None:
        """Write the trace if it has been started."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        traces = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._say(
            f"the trace is in {self._folder}. View it with `xprof --logdir {self._folder}` (pip install xprof), or open "
            f"{traces[-1] if traces else 'its perfetto_trace.json.gz'} at https://ui.perfetto.dev"
        )


TRACES.add("profile", Profile)
