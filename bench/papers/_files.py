"""Find the data files of targets that use real data, or say which are missing."""

from pathlib import Path

MNIST_FILES = (
    "t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz",
    "the MNIST test set of LeCun, Cortes & Burges, e.g. github.com/kelas/mnist",
)


def data_folder(data: Path | None, name: str, wanted: str, origin: str) -> Path:
    """The subfolder of this name."""
    if data is None:
        raise ValueError(
            f"--data: this target runs on real files. Wanted a folder with a subfolder {name}/ "
            f"that holds {wanted}. They come from {origin}."
        )
    if not (data / name).is_dir():
        raise ValueError(
            f"--data: {data} has no subfolder {name}/. Wanted {wanted} in it. They come from "
            f"{origin}."
        )
    return data / name


def data_file(folder: Path, *names: str) -> Path:
    """The first of these files that is there."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"--data: no {names[0]} in {folder}")
