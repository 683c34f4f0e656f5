"""Data: synthetic clients with known truth, splits over clients, readers of real files."""

from jaxfed.data.partition import (
    Partition,
    partition_by_class,
    partition_dirichlet,
    partition_iid,
    partition_sizes,
    train_test_split,
)
from jaxfed.data.readers import read_arrays, read_folder, read_idx, read_images, read_table
from jaxfed.data.synthetic import (
    PERPCA_SETTINGS,
    ImageSequence,
    PerPCAData,
    TopicData,
    image_sequence_synthetic,
    misalignment_pair,
    perpca_synthetic,
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

__all__ = [
    "PERPCA_SETTINGS",
    "SPOKEN_FILLERS",
    "ImageSequence",
    "Partition",
    "PerPCAData",
    "TopicData",
    "bag_of_words",
    "english_stop_words",
    "image_sequence_synthetic",
    "misalignment_pair",
    "paragraphs",
    "partition_by_class",
    "partition_dirichlet",
    "partition_iid",
    "partition_sizes",
    "perpca_synthetic",
    "read_arrays",
    "read_folder",
    "read_idx",
    "read_images",
    "read_table",
    "read_text",
    "repair_mojibake",
    "strip_transcript",
    "topics_synthetic",
    "train_test_split",
]
