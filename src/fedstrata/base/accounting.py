"""ε of composed Gaussian mechanisms, with dp-accounting."""

import functools
import math

from fedstrata.base.gaussian import beyond_the_cut

POINTS = 200_000  # of a privacy loss distribution; more cost time and memory in proportion


@functools.cache  # a run asks again and again
def epsilon(noise: float, exchanges: int, delta: float) -> float:
    """ε at δ of `exchanges` Gaussian mechanisms with this noise multiplier (dp-accounting).

    The smaller of two upper bounds: privacy loss distributions, which are nearly exact, and Rényi divergences.
    No amplification by sampling is claimed: cohorts follow from a seed that is public to all participants.

    Args:
        noise: the noise multiplier.
        exchanges: how many mechanisms.
        delta: the δ.
    """
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError as error:
        raise ImportError(
            "privacy: ε is computed by dp-accounting, which is not installed: pip install 'fedstrata[privacy]'"
        ) from error
    if exchanges == 0 or noise == 0:
        return math.inf if exchanges else 0.0
    if (beyond := exchanges * beyond_the_cut(1 / noise)) > delta / 1000:  # the sampler is no Gaussian at this δ
        return math.inf
    delta -= beyond
    gaussian = dp_accounting.GaussianDpEvent(noise)
    by_renyi = float(rdp.RdpAccountant().compose(gaussian, exchanges).get_epsilon(delta))
    # The loss is a Gaussian of mean μ²/2 and deviation μ. At a fixed interval its table would grow without limit.
    mu = math.sqrt(exchanges) / noise
    interval = max(1e-4, (mu**2 + 20 * mu) / POINTS)
    if interval > 0.1:  # ε is in the thousands: nothing to tighten
        return by_renyi
    accountant = pld.PLDAccountant(value_discretization_interval=interval).compose(gaussian, exchanges)
    # Its sums of floats may fall below the exact value by about 1e-11 of it.
    return min(by_renyi, float(accountant.get_epsilon(delta)) * (1 + 1e-9))
