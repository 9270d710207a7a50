"""Plans run on numbers."""

from hier_allreduce.planning.plan import Ops


class Adding(Ops):
    """The reading of a plan in which values are numbers or arrays."""

    def reduce(self, step, own, others):
        return sum(others, own)
