"""Which parts of small sparse gradients are joined, so that together they cost one copy. No ops are made here.

::

    indices, rows known          of one dtype
    values, rows known           of one dtype, with equal rows, if their indices are joined
    both, rows not known         of one dtype each, with equal rows; the numbers of rows go along
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Hashable, Iterable, Iterator, List, Optional, Sequence, Tuple

from ..planning import Bucketing
from .compat import carrier
from .entries import COUNT_SPEC, COUNTS, DENSE, INDICES, VALUES, Entry
from .gradients import Matrix, dtype_of, merged_shape

Key = Callable[[int], Optional[Hashable]]  # what variables that are joined have in common; None: it is not joined


def join_entries(entries: Sequence[Entry], grads: Matrix, bucketing: Bucketing) -> List[Entry]:
    """Return the entries with small sparse ones joined, in the order of their first variables.

    Args:
        entries: of one variable each, from :func:`find_entries`.
        grads: the matrix.
        bucketing: entries of less than ``pack_below`` bytes on each tower are joined, as long as a tower's share of the
            whole has at most ``bucket_bytes``. Those whose number of rows is known only when the step runs count as
            small.
    """
    if not bucketing.pack_below or all(entry.part == DENSE for entry in entries):
        return list(entries)
    return _Joining(entries, grads, bucketing).entries()


class _Joining:
    def __init__(self, entries: Sequence[Entry], grads: Matrix, bucketing: Bucketing):
        self._grads, self._bucketing = grads, bucketing
        self._columns = grads.columns
        self._alone: Dict[str, Dict[int, Entry]] = {DENSE: {}, VALUES: {}, INDICES: {}}  # those not joined yet
        for entry in entries:
            self._alone[entry.part][entry.variables[0]] = entry
        self._rows = {v: tuple(_row_count(grad) for grad in self._columns[v]) for v in self._alone[VALUES]}

    def entries(self) -> List[Entry]:
        """Return all entries, joined or not."""
        units = list(self._joined())
        units += [[entry] for entry in self._alone[DENSE].values()]
        for variable, values in self._alone[VALUES].items():
            own = self._alone[INDICES].get(variable)  # unless it is joined
            units.append([values] if own is None else [values, own])
        return [entry for unit in sorted(units, key=lambda unit: min(unit[0].variables)) for entry in unit]

    def _join(self, variables: Sequence[int], part: str) -> Entry:
        """Return the entry of several variables, which are then no longer alone."""
        specs = [self._alone[part].pop(variable).spec for variable in variables]
        sizes = [spec.elements for spec in specs]
        spec = specs[0]._replace(elements=None if None in sizes else sum(filter(None, sizes)))
        rows = tuple(zip(*(self._rows[v] for v in variables))) if self._has_rows(variables[0]) else ()
        return Entry(tuple(variables), part, spec, rows)

    def _has_rows(self, variable: int) -> bool:
        """Return whether the numbers of a sparse gradient's rows are known, on all towers."""
        return None not in self._rows[variable]

    def _groups(self, variables: Iterable[int], part: str, key: Key) -> Iterator[Tuple[int, ...]]:
        """Yield groups of two or more small entries with the same key, of at most ``bucket_bytes`` on each tower."""
        towers = len(self._grads.rows)  # an entry's size is that of all towers' rows
        by_key: Dict[Hashable, List[Tuple[int, float]]] = {}
        for variable in variables:
            size, common = self._alone[part][variable].spec.bytes / towers, key(variable)
            if common is not None and size < self._bucketing.pack_below:
                by_key.setdefault(common, []).append((variable, size))
        for members in by_key.values():
            yield from (group for group in _filled(members, self._bucketing.bucket_bytes) if len(group) > 1)

    def _joined(self) -> Iterator[List[Entry]]:
        known, unknown = ([v for v in self._alone[VALUES] if self._has_rows(v) == wanted] for wanted in (True, False))
        with_indices: List[int] = []
        for group in list(self._groups(known, INDICES, self._index_key)):
            with_indices += group
            yield [self._join(group, INDICES)]
        for group in list(self._groups(with_indices, VALUES, self._row_key)):
            yield [self._join(group, VALUES)]
        for group in list(self._groups(unknown, VALUES, self._both_keys)):
            counts = COUNT_SPEC._replace(elements=len(group) * len(self._grads.rows))
            yield [
                self._join(group, VALUES),
                self._join(group, INDICES)._replace(follows=1),
                Entry(group, COUNTS, counts, follows=2),
            ]

    def _both_keys(self, variable: int) -> Optional[Hashable]:
        row = self._row_key(variable)
        return None if row is None else (row, self._index_key(variable))

    def _index_key(self, variable: int) -> Optional[Hashable]:
        return next(dtype_of(grad.indices) for grad in self._columns[variable] if grad is not None)

    def _row_key(self, variable: int) -> Optional[Hashable]:
        present = [grad for grad in self._columns[variable] if grad is not None]
        row = merged_shape(grad.values.shape[1:] for grad in present)
        dtype = dtype_of(present[0])
        ranks_known = all(grad.values.shape.ndims is not None for grad in present)
        if not ranks_known or not row.is_fully_defined() or carrier(dtype) != dtype:
            return None
        return (dtype, tuple(row.as_list()))


def _row_count(grad: Any) -> Any:
    if grad is None:
        return 0  # a tower without a gradient adds no rows
    return merged_shape([grad.values.shape[:1], grad.indices.shape]).as_list()[0]


def _filled(members: Iterable[Tuple[int, float]], most: int) -> List[Tuple[int, ...]]:
    """Divide (variable, bytes) into groups of at most ``most`` bytes, in readiness order: the last variable first."""
    groups: List[List[int]] = []
    room = -1.0
    for variable, size in sorted(members, reverse=True):
        if size > room:
            groups.append([])
            room = float(most)
        groups[-1].append(variable)
        room -= size
    return [tuple(sorted(group)) for group in groups]
