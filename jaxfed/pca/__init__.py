"""Personalized and federated principal component analysis."""

from jaxfed.pca.one_shot import Local as Local
from jaxfed.pca.one_shot import OneShot as OneShot
from jaxfed.pca.one_shot import Pooled as Pooled
from jaxfed.pca.perpca import PerPCA as PerPCA
from jaxfed.pca.shrinkage import shrink as shrink
from jaxfed.pca.split_half import split_half as split_half
from jaxfed.pca.varpro import VarProPerPCA as VarProPerPCA
