"""Data: readers of files, splits over clients, and synthetic clients with known truth."""

from jaxfed import _names
from jaxfed.data.images import (
    LabelledClients,
    LabelledImages,
    read_cifar10,
    read_femnist,
    read_mnist,
)
from jaxfed.data.partition import (
    Partition,
    partition_by_class,
    partition_dirichlet,
    partition_iid,
    partition_sizes,
    train_test_split,
)
from jaxfed.data.readers import read_arrays, read_folder, read_idx, read_images, read_table
from jaxfed.data.sources import NpyFolder, ParquetGroups
from jaxfed.data.synthetic.faps import SpectrumData, spectrum_synthetic
from jaxfed.data.synthetic.gcca import (
    GCCAData,
    NonlinearViews,
    gcca_synthetic,
    nonlinear_views_synthetic,
)
from jaxfed.data.synthetic.hierarchical import HierarchicalData, hierarchical_synthetic
from jaxfed.data.synthetic.perpca import (
    PERPCA_SETTINGS,
    PerPCAData,
    misalignment_pair,
    perpca_synthetic,
)
from jaxfed.data.synthetic.perpca_applications import (
    ImageSequence,
    TopicData,
    image_sequence_synthetic,
    topics_synthetic,
)
from jaxfed.data.text import (
    SPOKEN_FILLERS,
    bag_of_words,
    english_stop_words,
    paragraphs,
    read_text,
    repair_mojibake,
    strip_transcript,
)
from jaxfed.data.views import read_views

__all__ = [
    "PERPCA_SETTINGS",
    "SPOKEN_FILLERS",
    "GCCAData",
    "HierarchicalData",
    "ImageSequence",
    "LabelledClients",
    "LabelledImages",
    "NonlinearViews",
    "NpyFolder",
    "ParquetGroups",
    "Partition",
    "PerPCAData",
    "SpectrumData",
    "TopicData",
    "bag_of_words",
    "english_stop_words",
    "gcca_synthetic",
    "hierarchical_synthetic",
    "image_sequence_synthetic",
    "misalignment_pair",
    "nonlinear_views_synthetic",
    "paragraphs",
    "partition_by_class",
    "partition_dirichlet",
    "partition_iid",
    "partition_sizes",
    "perpca_synthetic",
    "read_arrays",
    "read_cifar10",
    "read_femnist",
    "read_folder",
    "read_idx",
    "read_images",
    "read_mnist",
    "read_table",
    "read_text",
    "read_views",
    "repair_mojibake",
    "spectrum_synthetic",
    "strip_transcript",
    "topics_synthetic",
    "train_test_split",
]

__dir__ = _names.public_names(__name__)
