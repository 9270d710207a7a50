"""``python -m hier_allreduce``: says where the command is, which another distribution has."""

import sys

if __name__ == "__main__":
    sys.exit(
        "hier_allreduce has no command: `python -m pip install ./tools` in the checkout installs"
        " hier-allreduce, with tune and doctor"
    )
