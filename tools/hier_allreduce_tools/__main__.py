"""``python -m hier_allreduce_tools``, where the command is not on PATH."""

import sys

from . import main

if __name__ == "__main__":  # processes that are spawned import it again
    sys.exit(main())
