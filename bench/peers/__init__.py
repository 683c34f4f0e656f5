"""The same work by jaxfed and by the library that one would otherwise use, each in its own process.

Each module is a pair: `CASES` draws data for a seed, with NumPy and scikit-learn; `SIDES` imports a
library and returns a function from the data to NumPy arrays; and `answer` tells from these, with
NumPy alone, how well the problem was solved. `ANSWER` says what it is.
"""
