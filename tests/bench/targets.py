"""What the tests of the papers' targets share: cells by labels, and files like the real ones."""

import gzip

import numpy as np

from papers.report import Cell, Labels, Report

DIGITS = {"fou": 5, "fac": 7, "kar": 4, "pix": 6, "zer": 5, "mor": 3}  # views, with few features


def cells(report: Report) -> dict[Labels, Cell]:
    """The cells by what tells their rows apart."""
    return {
        tuple(row[column] for column in report.columns): row["cell"]
        for row in report.rows
        if "cell" in row
    }


def differing(report: Report) -> set[Labels]:
    """The labels of the rows that differ."""
    return {labels for labels, cell in cells(report).items() if cell.verdict.startswith("differs")}


def write_idx(path, array: np.ndarray) -> None:
    """Write bytes as the files of MNIST are."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), 1))


def write_mnist(folder, images: np.ndarray, labels: np.ndarray) -> None:
    """Write MNIST's test set."""
    (folder / "mnist").mkdir()
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        write_idx(folder / "mnist" / f"t10k-{name}-ubyte.gz", array)


def write_digits(folder, labels: np.ndarray, views: dict[str, np.ndarray]) -> None:
    """Write feature views of digits."""
    (folder / "mfeat").mkdir()
    np.savez(folder / "mfeat" / "mfeat.npz", labels=labels, **views)


def classes_told_apart(each: int, noise: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Three classes that every view tells apart: labels and views."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), each).astype(np.uint8)
    return labels, {
        name: rng.normal(size=(3, width))[labels] + noise * rng.normal(size=(3 * each, width))
        for name, width in DIGITS.items()
    }
