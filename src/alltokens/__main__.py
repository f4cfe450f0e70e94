"""python -m alltokens, and torchrun -m alltokens."""

import sys

from alltokens.cli import main

if __name__ == "__main__":
    sys.exit(main())
