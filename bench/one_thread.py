"""Give NumPy one thread, which has to happen before NumPy is first imported."""

import os


def single_threaded_blas() -> None:
    """Set the variables that BLAS libraries read when they are loaded."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
