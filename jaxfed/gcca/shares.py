r"""MAX-VAR if some clients have not seen some entities.

Let \(D_j\) be the diagonal matrix that is 1 where client j has seen an entity, and
\(W = \operatorname{mean}_j D_j\) the share of clients that have seen each entity. MAX-VAR is then

.. math:: \min_{G^T W G = I,\; Q_j} \tfrac12 \sum_j \|D_j (X_j Q_j / \sqrt L - G)\|_F^2.

Its solution is \(G = W^{-1/2} H\) with the top eigenvectors H of
\(W^{-1/2} \sum_j P_j W^{-1/2}\), where \(P_j\) is the projection onto the columns of
\(D_j X_j\). In terms of H, the problem is the same as without missing entities, where W is the
identity.

Source: van de Velden & Takane (2012), Generalized canonical correlation analysis with missing
values, Computational Statistics, based on Gifi's missing-data passive method.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

Observed = Float[Array, " entities"] | None  # 1 if ONE client has seen it; None: all are seen
Root = Float[Array, "entities 1"] | None


def seen_rows(
    observed: Observed, table: Float[Array, "entities columns"]
) -> Float[Array, "entities columns"]:
    """Set the rows of entities that ONE client has not seen to zero."""
    return table if observed is None else table * observed[:, None]


def root_of(shares: Observed) -> Root:
    """Return the root of the share of clients that have seen each entity; None for complete views.

    Entities that nobody has seen, and that have no scores, count as seen by all.
    """
    # A lossy channel may turn a share into zero.
    return None if shares is None else jnp.sqrt(jnp.where(shares > 0, shares, 1))[:, None]


def divided(
    table: Float[Array, "entities columns"], root: Root
) -> Float[Array, "entities columns"]:
    """Divide a table's rows by the roots; return the table itself if there are none."""
    return table if root is None else table / root
