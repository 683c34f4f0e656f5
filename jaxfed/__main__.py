"""`python -m jaxfed`."""

import sys

from jaxfed.cli import main

if __name__ == "__main__":
    sys.exit(main())
