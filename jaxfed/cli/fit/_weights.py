"""`jaxfed fit ... --weight-column`: how often each row of a table counts."""

from collections.abc import Sequence
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed.cli._common import taken_out
from jaxfed.cli._options import option
from jaxfed.core.clients.clients import Clients
from jaxfed.preprocess import Standardization
from jaxfed.preprocess.standardize import deviation

Tables = Sequence[Float[np.ndarray, "n_i d"]]
Weights = Sequence[Float[np.ndarray, " n_i"]]

MOST = float(np.finfo(float).max) ** 0.8  # of weights: sums of weighted squares stay finite
LEAST = 1 / MOST
OPTION = option(
    "--weight-column",
    str,
    "column that says how often a row counts, no feature: a row of weight two counts as two; "
    "default: each row counts once",
    None,
)


def check(arguments: SimpleNamespace) -> None:
    """Refuse what takes no weights, before any file is read.

    Raises:
        ValueError: names the option.
    """
    if getattr(arguments, "weight_column", None) is None:
        return
    for name in ("impute", "bootstrap", "epsilon"):
        if getattr(arguments, name, None) is not None:
            raise ValueError(f"--{name}: is not for --weight-column, which makes moments of rows")
    if getattr(arguments, "groups", None) is not None:
        for name in ("center", "scale"):
            if getattr(arguments, name) == "shared":
                raise ValueError(
                    f"--{name}: wanted none or local with --weight-column and --groups, since a "
                    "weighted mean of all rows is no robust one, got shared"
                )


def counted(
    column: str, tables: Tables, names: Sequence[str], features: list[str] | None
) -> list[np.ndarray]:
    """The rows of positive weight, in double precision.

    Args:
        column: with the weights.
        tables: of the clients, with this column.
        names: of the clients.
        features: the names of the columns.

    Raises:
        ValueError: if there is no such column or no other, a weight is negative, missing, too small
            or too large, or a client has none that is positive.
    """
    weights, _, others = taken_out("weight-column", column, tables, features)
    if not others:
        raise ValueError(f"--weight-column: wanted columns of features besides {column}, got none")
    found = []
    for name, table, own in zip(names, tables, weights, strict=True):
        bad = ~((own == 0) | ((own > LEAST) & (own < MOST)))
        if bad.any():
            raise ValueError(
                f"--weight-column: wanted weights that are 0 or from {LEAST:.0e} to {MOST:.0e}, "
                f"got {own[bad][0]:g} of {name} in row {np.argmax(bad)} (from 0)"
            )
        if not own.any():
            raise ValueError(f"--weight-column: wanted some positive weight of {name}, got zeros")
        found.append(table[own > 0].astype(float))
    return found


def standardization(tables: Tables, weights: Weights, center: str, scale: str) -> Standardization:
    """What `jaxfed.preprocess.Standardize` learns if rows of weight two are there twice.

    Args:
        tables: of the clients.
        weights: of their rows, positive.
        center: as of `Standardize`.
        scale: as of `Standardize`.
    """
    totals = np.asarray([own.sum() for own in weights])
    shares = totals / totals.sum()

    def means(values: Sequence[np.ndarray]) -> np.ndarray:
        pairs = zip(values, weights, strict=True)
        return np.stack([np.average(x, axis=0, weights=own) for x, own in pairs])

    def squares(about: np.ndarray) -> np.ndarray:
        return means([(x - mean) ** 2 for x, mean in zip(tables, about, strict=True)])

    own = means(tables)
    common = np.broadcast_to(shares @ own, own.shape)
    mean = {"shared": common, "local": own, "none": np.zeros_like(own)}[center]
    if scale == "shared":
        about = own if center == "local" else common
        found = deviation(jnp.asarray(shares @ squares(about)), jnp.asarray(about) ** 2)
    elif scale == "local":
        found = deviation(jnp.asarray(squares(own)), jnp.asarray(own) ** 2)
    elif scale == "energy":
        energies = squares(mean).mean(axis=1, keepdims=True)
        found = deviation(jnp.asarray(energies), jnp.mean(mean**2, axis=1, keepdims=True))
    else:
        found = jnp.ones(())
    return Standardization(mean, jnp.broadcast_to(found, mean.shape))


def scaled(tables: Tables, weights: Weights) -> list[np.ndarray]:
    """Rows whose second moments are those of the weighted rows."""
    roots = (np.sqrt(own / own.sum() * len(own)) for own in weights)
    return [x * root[:, None] for x, root in zip(tables, roots, strict=True)]


def moments(
    tables: Tables, weights: Weights, names: Sequence[str], features: Sequence[str] | None
) -> Clients:
    """The clients' second moments, which count as often as their weights together.

    Args:
        tables: of the clients, in double precision.
        weights: of their rows, positive.
        names: of the clients.
        features: their names.
    """
    products = [x.T @ x / len(x) for x in scaled(tables, weights)]
    totals = np.asarray([own.sum() for own in weights])
    return Clients.from_moments(products, counts=totals, names=names, features=features)
