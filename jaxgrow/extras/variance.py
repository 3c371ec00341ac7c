"""How is the schedule "variance" of layer dropping fitted to measurements?"""

import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from jaxgrow.layerdrop.schedules import Variance


def fit_variance(times: ArrayLike, variance: ArrayLike) -> Variance:
    """Fit the curve `Variance` to measurements.

    The measurements can be ``(loss_dropped - loss_baseline)^2`` of two runs
    (``python -m train.variance`` reads them from the logs). The function fits
    ``log v = a + (shape - 1) (log u - u / peak)``, which is linear in three unknowns, by least
    squares. Each point has the weight v^2, so that, to first order, this is a least-squares fit of
    v itself. Zeros have no weight. The function is pure and uses NumPy in float64. [reconstructed]

    Args:
      times: the times u of the measurements, [n], in (0, 1].
      variance: the measured values, [n], not negative.

    Returns:
      The curve, for ``LayerDrop(time="variance", variance=...)``.

    Raises:
      ValueError: fewer than three points that are not zero, or a curve without a peak.

    Example:
      >>> u = np.linspace(0.1, 1, 10)
      >>> found = fit_variance(u, Variance(peak=0.25, shape=3.0)(u))
      >>> round(found.peak, 3), round(found.shape, 3)
      (0.25, 3.0)
    """
    measured = np.asarray(variance, np.float64)
    some = measured > 0
    u = np.asarray(times, np.float64)[some]
    v = measured[some]
    if len(np.unique(u)) < 3:
        raise ValueError(
            f"a fit needs at least three points that are not zero, but there are {len(np.unique(u))}"
        )
    v = v / v.max()
    terms: NDArray[np.float64] = np.stack([np.ones_like(u), np.log(u), -u], 1)
    logs: NDArray[np.float64] = v * np.log(v)
    weighted: NDArray[np.float64] = v[:, None] * terms
    _, rise, fall = np.linalg.lstsq(weighted, logs, rcond=None)[0]
    if not 0 < rise <= fall:
        raise ValueError(
            "the variance does not have a peak while layers are dropped. It only "
            f"{'falls' if rise <= 0 else 'rises'}. Measure longer or more often, or use another time than 'variance'"
        )
    return Variance(float(rise / fall), float(1 + rise))
