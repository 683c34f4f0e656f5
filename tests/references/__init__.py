"""Plain NumPy references, in double precision, that the library is compared with."""
