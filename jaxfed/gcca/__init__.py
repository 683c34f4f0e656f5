"""Generalized canonical correlation analysis (GCCA) of views that stay with their clients."""

from jaxfed import _names
from jaxfed.gcca.ajive import AJIVE as AJIVE
from jaxfed.gcca.ajive import Joint as Joint
from jaxfed.gcca.ajive import ViewParts as ViewParts
from jaxfed.gcca.ajive import ViewScores as ViewScores
from jaxfed.gcca.alignment import Alignment as Alignment
from jaxfed.gcca.alignment import align as align
from jaxfed.gcca.deep import DeepMaxVar as DeepMaxVar
from jaxfed.gcca.maxvar import MaxVar as MaxVar
from jaxfed.gcca.metrics import Optimum as Optimum
from jaxfed.gcca.metrics import alignment_accuracy as alignment_accuracy
from jaxfed.gcca.metrics import cost as cost
from jaxfed.gcca.metrics import optimum as optimum
from jaxfed.gcca.metrics import subspace_distance as subspace_distance
from jaxfed.gcca.metrics import transform as transform
from jaxfed.gcca.mvlsa import MVLSA as MVLSA
from jaxfed.gcca.permutations import CommonComponents as CommonComponents
from jaxfed.gcca.permutations import permutation_test as permutation_test
from jaxfed.gcca.pseudonyms import pseudonyms as pseudonyms
from jaxfed.gcca.ranks import JointRank as JointRank
from jaxfed.gcca.ranks import joint_rank as joint_rank
from jaxfed.gcca.views import SparseView as SparseView
from jaxfed.gcca.views import View as View
from jaxfed.gcca.views import Views as Views

__dir__ = _names.public_names(__name__)
