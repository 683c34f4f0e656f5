r"""Entities that some clients have not seen.

With \(D_j\) the diagonal matrix that is 1 where client j has seen an entity, and the shares of
clients that have seen each, \(W = \operatorname{mean}_j D_j\), MAX-VAR is

.. math:: \min_{G^T W G = I,\; Q_j} \tfrac12 \sum_j \|D_j (X_j Q_j / \sqrt L - G)\|_F^2.

Its solution is \(G = W^{-1/2} H\) with the top eigenvectors H of
\(W^{-1/2} \sum_j P_j W^{-1/2}\), where \(P_j\) is the projection onto the columns of
\(D_j X_j\). In terms of H all is as without gaps, W being the identity then.

Source: van de Velden & Takane (2012), Generalized canonical correlation analysis with missing
values, Computational Statistics, on Gifi's missing-data passive method.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

Observed = Float[Array, " entities"] | None  # 1 for one that ONE client has seen; None: all
Root = Float[Array, "entities 1"] | None


def seen_rows(
    observed: Observed, table: Float[Array, "entities columns"]
) -> Float[Array, "entities columns"]:
    """A table with zero rows for the entities that ONE client has not seen."""
    return table if observed is None else table * observed[:, None]


def root_of(shares: Observed) -> Root:
    """The root of the share of clients that have seen each entity; None where all have seen all.

    Entities that nobody has seen, of which no scores come, count like those that all have seen.
    """
    # Lossy channels may leave nothing of a number.
    return None if shares is None else jnp.sqrt(jnp.where(shares > 0, shares, 1))[:, None]


def divided(
    table: Float[Array, "entities columns"], root: Root
) -> Float[Array, "entities columns"]:
    """A table's rows over the roots; the table itself where all clients have seen all entities."""
    return table if root is None else table / root
