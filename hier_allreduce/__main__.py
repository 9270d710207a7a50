"""``python -m hier_allreduce``: says where the commands are, which are a package of their own."""

import sys

if __name__ == "__main__":
    sys.exit(
        "hier_allreduce has no commands of its own: python -m pip install ./tools in the checkout"
        " installs hier-allreduce with tune, doctor and cost"
    )
