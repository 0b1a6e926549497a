"""`python -m meshift.services.cli` is the `meshift` command."""

import sys

from meshift.services.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
