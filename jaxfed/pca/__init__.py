"""Personalized and federated principal component analysis."""

from jaxfed.pca.applications import cluster_clients as cluster_clients
from jaxfed.pca.applications import embed_clients as embed_clients
from jaxfed.pca.applications import separate_video as separate_video
from jaxfed.pca.applications import topic_words as topic_words
from jaxfed.pca.one_shot import Local as Local
from jaxfed.pca.one_shot import OneShot as OneShot
from jaxfed.pca.one_shot import Pooled as Pooled
from jaxfed.pca.perpca import PerPCA as PerPCA
from jaxfed.pca.ranks import suggest_ranks as suggest_ranks
from jaxfed.pca.robust import robust_pca as robust_pca
from jaxfed.pca.shrinkage import shrink as shrink
from jaxfed.pca.split_half import split_half as split_half
from jaxfed.pca.varpro import VarProPerPCA as VarProPerPCA
