"""Personalized and federated principal component analysis.

Second moments are squares of the data. In single precision they and all derivatives stay finite for
values of about 1e-15 to 1e15. Above 1e18 they overflow and the run ends as diverged. Below 1e-12,
`jaxfed.fit` computes in double precision, and `jaxfed.rollout` warns.
"""

from jaxfed import _names
from jaxfed.pca.applications import cluster_clients as cluster_clients
from jaxfed.pca.applications import embed_clients as embed_clients
from jaxfed.pca.applications import separate_video as separate_video
from jaxfed.pca.applications import topic_words as topic_words
from jaxfed.pca.empirical_bayes import EmpiricalBayesPCA as EmpiricalBayesPCA
from jaxfed.pca.faps import FAPS as FAPS
from jaxfed.pca.fitted import ExplainedVariance as ExplainedVariance
from jaxfed.pca.fitted import anomaly_score as anomaly_score
from jaxfed.pca.fitted import complete as complete
from jaxfed.pca.fitted import explained_variance as explained_variance
from jaxfed.pca.fitted import fit_local as fit_local
from jaxfed.pca.fitted import inverse_transform as inverse_transform
from jaxfed.pca.fitted import principal_axes as principal_axes
from jaxfed.pca.fitted import transform as transform
from jaxfed.pca.hierarchical import HierarchicalPCA as HierarchicalPCA
from jaxfed.pca.hmf import HMF as HMF
from jaxfed.pca.krylov import BlockLanczos as BlockLanczos
from jaxfed.pca.local_power import LocalPower as LocalPower
from jaxfed.pca.one_shot import Local as Local
from jaxfed.pca.one_shot import OneShot as OneShot
from jaxfed.pca.one_shot import Pooled as Pooled
from jaxfed.pca.perpca import PerPCA as PerPCA
from jaxfed.pca.ranks import SuggestedRanks as SuggestedRanks
from jaxfed.pca.ranks import suggest_ranks as suggest_ranks
from jaxfed.pca.robust import robust_pca as robust_pca
from jaxfed.pca.rotation import Rotated as Rotated
from jaxfed.pca.rotation import rotate as rotate
from jaxfed.pca.shrinkage import shrink as shrink
from jaxfed.pca.split_half import split_half as split_half
from jaxfed.pca.subspace_iteration import SubspaceIteration as SubspaceIteration
from jaxfed.pca.tcmf import TCMF as TCMF
from jaxfed.pca.tucker import PerTucker as PerTucker
from jaxfed.pca.variance_ranks import VarianceRanks as VarianceRanks
from jaxfed.pca.variance_ranks import ranks_for_variance as ranks_for_variance

__dir__ = _names.public_names(__name__)
