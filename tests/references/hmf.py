"""Heterogeneous matrix factorization in plain NumPy, one client and one factor after the other.

Written for reading beside the paper, N. Shi, S. Fattahi and R. Al Kontar, "Heterogeneous Matrix
Factorization: When Features Differ by Datasets" (2023): M_i = U_g V_ig^T + U_il V_il^T with samples
in the columns of M_i, a mask of observed entries beside it.
"""

from typing import NamedTuple

import numpy as np


class Steps(NamedTuple):
    """Step sizes and penalties; the paper has one of each."""

    shared: float
    own: list  # of each client's components
    scores: float
    shared_penalty: float
    own_penalties: list

    @classmethod
    def equal(cls, step_size, penalty, clients):
        """The paper's."""
        return cls(step_size, [step_size] * clients, step_size, penalty, [penalty] * clients)


def corrected(ug, vg, ul, vl):
    """The same product with U_l orthogonal to U_g."""
    inverse = np.linalg.inv(ug.T @ ug)
    return vg + vl @ ul.T @ ug @ inverse, ul - ug @ inverse @ ug.T @ ul


def rounds(matrices, masks, ug, vg, ul, vl, steps, count):
    """U_g, lists of V_ig, U_il, V_il, all corrected, and the objective at each round's beginning.

    `matrices` have any numbers in place of what is masked; lists hold one array for each client.
    """
    vg, ul, vl = list(vg), list(ul), list(vl)
    objectives = []
    for _ in range(count):
        copies, objective = [], 0
        for i, (m, mask) in enumerate(zip(matrices, masks, strict=True)):
            rest = np.where(mask, m - ug @ vg[i].T - ul[i] @ vl[i].T, 0)
            excess_g = ug.T @ ug - np.eye(ug.shape[1])
            excess_l = ul[i].T @ ul[i] - np.eye(ul[i].shape[1])
            beta_g, beta_l = steps.shared_penalty, steps.own_penalties[i]
            objective += (rest**2).sum() / 2
            objective += beta_g / 2 * (excess_g**2).sum() + beta_l / 2 * (excess_l**2).sum()
            by_ug = -rest @ vg[i] + 2 * beta_g * ug @ excess_g
            by_ul = -rest @ vl[i] + 2 * beta_l * ul[i] @ excess_l
            by_vg, by_vl = -rest.T @ ug, -rest.T @ ul[i]
            copies.append(ug - steps.shared * by_ug)
            ul[i] = ul[i] - steps.own[i] * by_ul
            vg[i], vl[i] = vg[i] - steps.scores * by_vg, vl[i] - steps.scores * by_vl
        objectives.append(objective / len(matrices))
        ug = np.mean(copies, axis=0)
        for i in range(len(matrices)):
            vg[i], ul[i] = corrected(ug, vg[i], ul[i], vl[i])
    return ug, vg, ul, vl, np.array(objectives)
