"""Standardize samples by means and deviations, common to all clients or each client's own."""

from typing import Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import Algorithm, check_flag, check_name
from jaxfed.core.clients.samples import IncompleteSamples, SampleRows, check_rows
from jaxfed.core.clients.standardization import Standardization
from jaxfed.core.contract.algorithm import nothing_left
from jaxfed.linalg.sums import sum_of_rows
from jaxfed.reduction import Gather, Sum

CENTERS = ("shared", "local", "none")
SCALES = ("shared", "local", "energy", "none")

Row = Float[Array, " features"]


class Moments(NamedTuple):
    """Moments of the features; None for moments that are not needed."""

    mean: PyTree[Row]
    variance: PyTree[Row]


class _Sums(NamedTuple):
    """Sums over samples, per feature, of deviations from a reference.

    They are one client's, or all clients' along a leading axis; None for what is not sent. There
    is a single count for all features, or one per feature.
    """

    counts: Float[Array, "*clients counts"]
    first: PyTree[Float[Array, "*clients features"]]  # power of the deviations
    second: PyTree[Float[Array, "*clients features"]]


@final
class Standardize(Algorithm):
    r"""Means to subtract from samples, and scales to divide them by.

    Before the round, clients send sums, which give a rough common mean. In the round they send sums
    of deviations from it and of their squares, which give mean and deviation without the
    cancellation of \(\sum x^2 - (\sum x)^2 / n\). One round is enough (`rounds=1`); further rounds
    only change rounding errors. Messages are sums, which can be masked
    (`jaxfed.channel.secure_sum`); if nothing is common, nothing is sent. All samples count equally.
    Clients' weights are ignored, except that clients of weight zero are left out. Missing entries
    do not count.

    `solution.result.local` is a `Standardization` for each client; its `transform` standardizes
    them, and `jaxfed.personalize` computes those of new clients. `solution.result.shared` is one
    for samples of unknown clients, or None if it depends on the client.

    * `center="shared"` subtracts the mean of all samples, `"local"` each client's own mean;
    * `scale="shared"` divides each feature by its standard deviation over all samples, about the
      mean that is subtracted (the common mean with `center="none"`), so differences between
      client means count only if they stay in the data. `"local"` divides by each client's own
      standard deviations about its mean. `"energy"` divides all features of a client by one number,
      so that the mean square of its entries becomes one.

    Features that are constant up to rounding are divided by the magnitude of their mean, or by one
    if it is zero, and clients without energy likewise.

    Source: Youngs & Cramer (1971), Some results relevant to choice of sum and sum-of-product
    algorithms; Chan, Golub & LeVeque (1983), Algorithms for computing the sample variance. Robust:
    the median of means of Nemirovsky & Yudin (1983), per feature, so that no relative scale has to
    be calibrated.
    """

    center: Literal["shared", "local", "none"] = eqx.field(static=True)
    scale: Literal["shared", "local", "energy", "none"] = eqx.field(static=True)
    robust: bool = eqx.field(static=True)

    def __init__(
        self,
        center: Literal["shared", "local", "none"] = "shared",
        scale: Literal["shared", "local", "energy", "none"] = "shared",
        *,
        robust: bool = False,
    ):
        """Set up the algorithm.

        Args:
            center: which mean is subtracted; see the class.
            scale: what samples are divided by; see the class.
            robust: use medians over the clients' means and mean squares instead of sums over all
                samples. Fewer than half of the clients may then send anything. The server sees
                individual messages, which cannot be masked.

        Raises:
            ValueError: if a name is unknown.
        """
        check_name("center", center, CENTERS)
        check_name("scale", scale, SCALES)
        check_flag("robust", robust)
        self.center, self.scale, self.robust = center, scale, bool(robust)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` for clients that hold no samples."""
        check_rows(clients)

    @property
    def _has_shared_mean(self) -> bool:
        return self.center == "shared" or (self.center == "none" and self.scale == "shared")

    @property
    def _has_shared_scale(self) -> bool:
        return self.scale == "shared"

    def first_message(self, key, data, warm_start):
        """Return counts and sums, from which the server computes a first mean."""
        if self._has_shared_mean:
            return self._message(_sums(data, 0.0)._replace(second=None))
        return None

    def server_init(self, key, first, like, warm_start) -> Moments:
        """Return the rough common mean."""
        ones = jnp.ones(like.values.shape[-1], like.count.dtype)
        mean = self._pooled(first).mean if self._has_shared_mean else None
        return Moments(mean, ones if self._has_shared_scale else None)

    def downlink(self, server):
        """Return the common moments."""
        return server

    def client_init(self, key, downlink, data, warm_start):
        """Return None: clients keep no state."""

    def client_step(self, key, downlink, local, data):
        """Sum deviations from the common mean known so far, or from the client's own.

        The objective is the mean square of these deviations.
        """
        about = downlink.mean if self._has_shared_mean else _own(data).mean
        sums = _sums(data, about)
        objective = jnp.mean(_over(sums.second, sums.counts))
        message = _Sums(
            sums.counts,
            sums.first if self._has_shared_mean else None,
            sums.second if self._has_shared_scale else None,
        )
        sent = self._has_shared_mean or self._has_shared_scale
        return self._message(message) if sent else None, None, {"objective": objective}

    def server_step(self, key, server, uplink):
        """Move the reference to the mean; the variance is about the mean."""
        if uplink is None:
            return server, nothing_left()
        shift, square = self._pooled(uplink)
        if shift is None:
            # Each client measured from its own mean, so the mean square is a variance already.
            return Moments(None, square), nothing_left()
        variance = None if square is None else jnp.maximum(square - shift**2, 0)
        return Moments(server.mean + shift, variance), nothing_left()

    def client_result(self, downlink, local, data) -> Standardization:
        """Return what to subtract from the client's samples, and what to divide them by."""
        own = _own(data)
        about = own.mean if downlink.mean is None else downlink.mean
        mean = {"shared": about, "local": own.mean, "none": jnp.zeros_like(own.mean)}[self.center]
        if self.scale == "shared":
            scale = deviation(downlink.variance, about**2)
        elif self.scale == "local":
            scale = deviation(own.variance, own.mean**2)
        elif self.scale == "energy":
            left = _sums(data, mean)
            scale = deviation(jnp.mean(_over(left.second, left.counts)), jnp.mean(mean**2))
        else:
            scale = jnp.asarray(1.0, mean.dtype)
        return Standardization(mean, jnp.broadcast_to(scale, mean.shape))

    def shared_result(self, server) -> Standardization | None:
        """Return the map for samples of unknown clients, if it does not depend on the client."""
        if server.mean is None or self.scale in ("local", "energy"):
            return None
        zeros = jnp.zeros_like(server.mean)
        common = server.variance is not None
        scale = deviation(server.variance, server.mean**2) if common else zeros + 1
        return Standardization(zeros if self.center == "none" else server.mean, scale)

    def _message(self, sums: _Sums) -> Sum | Gather:
        return Gather(sums) if self.robust else Sum(sums)

    def _pooled(self, sums: _Sums) -> Moments:
        """Return mean and mean square of the deviations, of all samples or the median client."""

        def mean(total: Array) -> Array:
            if not self.robust:
                return _over(total, sums.counts)
            # Absent clients have no samples.
            return jnp.nanmedian(jnp.where(sums.counts > 0, _over(total, sums.counts), jnp.nan), 0)

        return Moments(*jax.tree.map(mean, (sums.first, sums.second)))


def _sums(data: SampleRows, about: Row | float) -> _Sums:
    """Return ONE client's sums of deviations from a reference."""
    observed = data.observed
    apart = jnp.where(observed, data.values.astype(data.count.dtype) - about, 0)
    # For complete samples, one count serves all features.
    counted = observed if isinstance(data, IncompleteSamples) else data.mask[:, None]
    return _Sums(
        sum_of_rows(counted.astype(apart.dtype)), sum_of_rows(apart), sum_of_rows(apart**2)
    )


def _over(total: Array, count: Array) -> Array:
    return total / jnp.maximum(count, 1)


def _own(data: SampleRows) -> Moments:
    """Compute ONE client's mean and variance in two passes, the first a rough one."""
    rough = _sums(data, 0.0)
    about = _over(rough.first, rough.counts)
    sums = _sums(data, about)
    shift, square = _over(sums.first, sums.counts), _over(sums.second, sums.counts)
    return Moments(about + shift, jnp.maximum(square - shift**2, 0))


def deviation(variance: Array, square: Array) -> Array:
    """Return the root of a variance; that of the squared mean, or one, where it is rounding of it.

    Divided by one, a constant feature would have a unit, beside which others may be rounding.
    """
    # Numbers near a mean μ are rounded by up to eps |μ|, so a variance below about eps² μ² says
    # nothing.
    constant = variance <= 64 * jnp.finfo(variance.dtype).eps ** 2 * square
    return jnp.sqrt(jnp.where(constant, jnp.where(square > 0, square, 1), variance))
