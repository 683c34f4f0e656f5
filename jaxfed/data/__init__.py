"""Data: readers of files, splits over clients, and synthetic clients with known truth."""

from jaxfed import _names
from jaxfed.data._arrays import ClientTables as ClientTables
from jaxfed.data.grouping import group_parquet as group_parquet
from jaxfed.data.images import LabelledClients as LabelledClients
from jaxfed.data.images import LabelledImages as LabelledImages
from jaxfed.data.images import read_cifar10 as read_cifar10
from jaxfed.data.images import read_femnist as read_femnist
from jaxfed.data.images import read_mnist as read_mnist
from jaxfed.data.partition import Partition as Partition
from jaxfed.data.partition import partition_by_class as partition_by_class
from jaxfed.data.partition import partition_dirichlet as partition_dirichlet
from jaxfed.data.partition import partition_iid as partition_iid
from jaxfed.data.partition import partition_sizes as partition_sizes
from jaxfed.data.partition import train_test_split as train_test_split
from jaxfed.data.readers import read_arrays as read_arrays
from jaxfed.data.readers import read_client as read_client
from jaxfed.data.readers import read_folder as read_folder
from jaxfed.data.readers import read_idx as read_idx
from jaxfed.data.readers import read_images as read_images
from jaxfed.data.readers import read_table as read_table
from jaxfed.data.single_cell import read_anndata as read_anndata
from jaxfed.data.sources import NpyFolder as NpyFolder
from jaxfed.data.sources import ParquetGroups as ParquetGroups
from jaxfed.data.synthetic.hierarchical import HierarchicalData as HierarchicalData
from jaxfed.data.synthetic.hierarchical import hierarchical_synthetic as hierarchical_synthetic
from jaxfed.data.synthetic.perpca import PerPCAData as PerPCAData
from jaxfed.data.synthetic.perpca import perpca_synthetic as perpca_synthetic
from jaxfed.data.synthetic.video import ImageSequence as ImageSequence
from jaxfed.data.synthetic.video import image_sequence_synthetic as image_sequence_synthetic
from jaxfed.data.synthetic.views import NonlinearViews as NonlinearViews
from jaxfed.data.synthetic.views import nonlinear_views_synthetic as nonlinear_views_synthetic
from jaxfed.data.views import read_views as read_views

__dir__ = _names.public_names(__name__)
