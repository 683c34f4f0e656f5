"""What mvlearn's AJIVE finds in three draws, for the tests to hold ours against.

    python -m venv ORACLE
    ORACLE/bin/pip install numpy==1.24.4 scipy==1.10.1 scikit-learn==1.2.2 joblib matplotlib seaborn
    ORACLE/bin/pip install --no-deps mvlearn==0.5.0
    ORACLE/bin/python -m bench.oracles.ajive > tests/references/ajive.json

mvlearn is by Perry et al. (2021), its AJIVE by Iain Carmichael, both MIT; it is run, not copied.
"""

import json
import sys

import numpy as np
import scipy

SIGNAL_RANKS = (3, 4, 3)
# Joint directions by draw: as many as there are, one more, which some view lacks, and the rule's.
RANKS = {0: 2, 1: 3, 2: None}


def draw(seed: int, noise: float = 0.3) -> list[np.ndarray]:
    """Three centred views with two joint directions and one, two and one individual ones.

    By NumPy's old generator, whose stream never changes.
    """
    rng = np.random.RandomState(seed)
    scores = rng.normal(size=(20, 2))
    views = []
    for features, own in ((8, 1), (11, 2), (7, 1)):
        joint = scores @ rng.normal(size=(2, features))
        individual = rng.normal(size=(20, own)) @ rng.normal(size=(own, features))
        view = joint + individual + noise * rng.normal(size=(20, features))
        views.append(view - view.mean(0))
    return views


def found(seed: int, rank: int | None) -> dict[str, object]:
    """The parts of a draw, and the bounds of the rule."""
    from mvlearn.decomposition import AJIVE  # pyright: ignore[reportMissingImports]

    views, ranks = draw(seed), list(SIGNAL_RANKS)
    rule = AJIVE(init_signal_ranks=ranks, random_state=0).fit(views)
    parts = AJIVE(init_signal_ranks=ranks, joint_rank=rank, random_state=0).fit(views)
    return {
        "seed": seed,
        "rank": int(rule.joint_rank_wedin_est_) if rank is None else rank,
        "wedin_bound": rule.wedin_cutoff_,
        "random_bound": rule.rand_cutoff_,
        "rank_by_rule": int(rule.joint_rank_wedin_est_),
        "joint_scores": parts.joint_scores_.tolist(),
        "individual": [
            {"scores": u.tolist(), "singular_values": s.tolist(), "loadings": v.tolist()}
            for u, s, v in zip(
                parts.individual_scores_,
                parts.individual_svals_,
                parts.individual_loadings_,
                strict=True,
            )
        ],
    }


def main() -> None:
    import mvlearn  # pyright: ignore[reportMissingImports]

    source = {
        "command": "python -m bench.oracles.ajive",
        "versions": f"Python {sys.version.split()[0]}, mvlearn {mvlearn.__version__}, "
        f"NumPy {np.__version__}, SciPy {scipy.__version__}",
        "source": "https://github.com/mvlearn/mvlearn, mvlearn/decomposition/ajive.py",
    }
    draws = [found(seed, rank) for seed, rank in RANKS.items()]
    json.dump({"source": source, "draws": draws}, sys.stdout)


if __name__ == "__main__":
    main()
