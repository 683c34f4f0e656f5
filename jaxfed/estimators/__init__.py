"""Estimators with scikit-learn's interface: rows are samples, and `groups` names their clients.

Install with `pip install 'jaxfed[sklearn]'`. Estimators work in pipelines and searches. To let
`GroupKFold` hold out whole clients and pass the groups on, enable scikit-learn's metadata routing:

    sklearn.set_config(enable_metadata_routing=True)
    model = PersonalizedPCA().set_fit_request(groups=True).set_score_request(groups=True)
    GridSearchCV(model, {"local_rank": [1, 2, 3]}, cv=GroupKFold()).fit(X, groups=groups)
"""

from jaxfed import _names
from jaxfed._optional import require

require("sklearn.base", extra="sklearn")

from jaxfed.estimators._ajive import FederatedAJIVE as FederatedAJIVE  # noqa: E402
from jaxfed.estimators._gcca import FederatedGCCA as FederatedGCCA  # noqa: E402
from jaxfed.estimators._mf import HeterogeneousMF as HeterogeneousMF  # noqa: E402
from jaxfed.estimators._mf import TripleComponentMF as TripleComponentMF  # noqa: E402
from jaxfed.estimators._nmf import IntegrativeNMF as IntegrativeNMF  # noqa: E402
from jaxfed.estimators._pca import FederatedPCA as FederatedPCA  # noqa: E402
from jaxfed.estimators._pca import HierarchicalBayesPCA as HierarchicalBayesPCA  # noqa: E402
from jaxfed.estimators._pca import PersonalizedPCA as PersonalizedPCA  # noqa: E402

__dir__ = _names.public_names(__name__)
