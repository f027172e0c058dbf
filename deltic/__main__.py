"""`python -m deltic`."""

import sys

from deltic.cli import main

if __name__ == "__main__":
    sys.exit(main())
