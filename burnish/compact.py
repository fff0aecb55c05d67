"""Immutable sequences that store the per-token data of samples in 0 to 8 bytes per token.

    type         of               bytes
    IntArray     token ids        4 per token; 8 if an id is outside int32
    FloatArray   log-probs        4 per token; 8 if one is not an fp32 number
    IntRuns      versions, turns  8 per run of equal numbers
    BoolRuns     masks            5 per run of equal values
    IntLists     kept ids         4 per token and 4 per id

All behave like tuples of Python numbers. Elements are exactly the numbers that were given; slices
and sums have the type of the sequence; ``repr`` is that of the tuple. A sequence equals a tuple
with the same elements and has its hash; it never equals a list. Two FloatArrays with NaN in the
same places are equal.

``IntArray(values)`` converts any iterable, and returns ``values`` if it is an IntArray already, as
``tuple`` does. ``np.asarray`` reads an IntArray or a FloatArray without a copy."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, total_ordering
from itertools import accumulate, chain, groupby, repeat
from typing import Any, Self, TypeVar, overload

import numpy as np

T = TypeVar("T")
S = TypeVar("S", bound="Compact[Any]")
N = TypeVar("N", int, float)
B = TypeVar("B", bound=int)


@total_ordering
class Compact(Sequence[T]):
    """A sequence that behaves like the tuple of its elements."""

    __slots__ = ()

    def __new__(cls, values: Iterable[Any] = ()) -> Self:
        """Return ``values`` if it has this type, otherwise its elements as this type."""
        if type(values) is cls:
            return values
        return _empty(cls) if type(values) is tuple and not values else cls._packed(values)

    @classmethod
    def _packed(cls, values: Iterable[Any]) -> Self:
        raise NotImplementedError

    @classmethod
    def _of(cls, *parts: Any) -> Self:
        """Return the sequence with these :meth:`_parts`, which must not change afterwards."""
        raise NotImplementedError

    def _parts(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _joined(self, other: Self) -> Self:
        """Return the elements of both."""
        raise NotImplementedError

    def _equals(self, other: Self) -> bool:
        return self._parts() == other._parts()

    def __add__(self, other: Sequence[T]) -> Self:
        if not isinstance(other, (Compact, tuple)):
            return NotImplemented
        return self._joined(type(self)(other))

    def __radd__(self, other: tuple[T, ...]) -> Self:
        if not isinstance(other, tuple):
            return NotImplemented
        return type(self)(other)._joined(self)

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return other is self or self._equals(other)
        if not isinstance(other, (Compact, tuple)):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, (Compact, tuple)):
            return NotImplemented
        return tuple(self) < tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sum(map(sys.getsizeof, self._parts()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restored, (type(self), *self._parts())) if self else (type(self), ())


@cache
def _empty(kind: type[S]) -> S:
    return kind._packed([])


def concatenated(columns: Sequence[Sequence[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    """Return all elements of all columns, one column after the other, as a new array.

    Fast for many short columns and for few long ones if all are of one type of this module.
    """
    kinds = {type(column) for column in columns}
    if kinds <= {IntArray} or kinds <= {FloatArray}:
        items: list[array[Any]] = [column._items for column in columns]  # type: ignore[attr-defined]
        return _array_of(items).astype(dtype)
    if kinds <= {IntRuns} or kinds <= {BoolRuns}:
        runs: Sequence[_Runs[Any]] = columns  # type: ignore[assignment]
        return _all_runs(runs, dtype)
    count = sum(map(len, columns))
    return np.fromiter(chain.from_iterable(columns), dtype=dtype, count=count)


def _array_of(items: Sequence[array[Any]]) -> np.ndarray[Any, Any]:
    """Return the numbers of all arrays, one array after the other."""
    codes = {item.typecode for item in items} or {"i"}
    if len(codes) > 1:
        return np.concatenate(items)
    return np.frombuffer(b"".join(items), dtype=codes.pop())


def _all_runs(columns: Sequence[_Runs[Any]], dtype: Any) -> np.ndarray[Any, Any]:
    values = _array_of([column._values for column in columns])
    ends = _array_of([column._ends for column in columns]).astype(np.int64)
    begins = np.append(0, ends)[:-1]
    firsts = np.cumsum([0, *(len(column._ends) for column in columns)])[:-1]
    begins[firsts[firsts < len(begins)]] = 0
    return np.repeat(values.astype(dtype), ends - begins)


def _restored(kind: type[Compact[Any]], *parts: Any) -> Compact[Any]:
    return kind._of(*(_trimmed(part) if isinstance(part, array) else part for part in parts))


def _trimmed(items: array[Any]) -> array[Any]:
    """Return a copy without spare memory, which arrays made of bytes have (6%)."""
    return items[:]


# ---- arrays --------------------------------------------------------------------------------------


class _Array(Compact[N]):
    """Numbers in an ``array.array``."""

    __slots__ = ("_items",)
    _items: array[N]

    @classmethod
    def _of(cls, *parts: Any) -> Self:
        instance = object.__new__(cls)
        (instance._items,) = parts
        return instance

    def _parts(self) -> tuple[Any, ...]:
        return (self._items,)

    @classmethod
    def repeat(cls, value: N, count: int) -> Self:
        """Return ``value``, ``count`` times."""
        return cls._of(cls((value,))._items * count)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[N]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> N | Self:
        if isinstance(index, slice):
            return self._of(self._items[index])
        return self._items[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        values = np.asarray(self._items)
        values.flags.writeable = False
        return np.array(values, dtype=dtype, copy=copy)

    def _joined(self, other: Self) -> Self:
        mine, others = self._items, other._items
        if mine.typecode == others.typecode:
            return self._of(mine + others)
        wide: Any = max(mine.typecode, others.typecode, key=lambda code: array(code).itemsize)
        return self._of(array(wide, chain(mine, others)))


class IntArray(_Array[int]):
    """Integers, such as token ids, in 4 bytes each; 8 if one is outside int32."""

    __slots__ = ()

    @classmethod
    def _packed(cls, values: Iterable[Any]) -> Self:
        return cls._of(_int_array(values))


class FloatArray(_Array[float]):
    """Floats, such as log-probs, in 4 bytes each; 8 if one is not an fp32 number."""

    __slots__ = ()

    @classmethod
    def _packed(cls, values: Iterable[Any]) -> Self:
        doubles = values if isinstance(values, np.ndarray) else array("d", values)
        wide = np.asarray(doubles, dtype=np.float64)
        with np.errstate(over="ignore"):
            small = wide.astype(np.float32)
        same = np.array_equal(small.astype(np.float64).view(np.int64), wide.view(np.int64))
        packed = array("f", small.tobytes()) if same else array("d", wide.tobytes())
        return cls._of(_trimmed(packed))

    def _equals(self, other: Self) -> bool:
        return np.array_equal(np.asarray(self), np.asarray(other), equal_nan=True)

    def __hash__(self) -> int:
        return hash(tuple(None if x != x else x for x in self))


def _int_array(values: Iterable[Any]) -> array[int]:
    if isinstance(values, np.ndarray) and values.dtype == np.int32:
        return _trimmed(array("i", values.tobytes()))
    items = values if isinstance(values, (list, tuple)) else [*values]
    try:
        return array("i", items)
    except OverflowError:
        return array("q", items)


def _counts(ends: array[int]) -> np.ndarray[Any, Any]:
    """Return the differences of consecutive ``ends``, the first from 0."""
    counts = np.array(ends, np.int64)
    counts[1:] -= counts[:-1]
    return counts


# ---- runs ----------------------------------------------------------------------------------------


class _Runs(Compact[B]):
    """Numbers as runs of equal ones."""

    __slots__ = ("_ends", "_values")
    _values: array[int]
    """The number of each run, different from that of the run before."""
    _ends: array[int]
    """Index after the last element of each run."""

    @classmethod
    def _of(cls, *parts: Any) -> Self:
        instance = object.__new__(cls)
        instance._values, instance._ends = parts
        return instance

    def _parts(self) -> tuple[Any, ...]:
        return self._values, self._ends

    @classmethod
    def _packed(cls, values: Iterable[Any]) -> Self:
        if not isinstance(values, np.ndarray):
            return cls.of_runs([(value, len([*run])) for value, run in groupby(values)])
        begins = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
        counts = np.diff(np.append(begins, len(values)))
        return cls.of_runs(zip(values[begins].tolist(), counts.tolist(), strict=True))

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[B, int]]) -> Self:
        """Return the sequence with these runs (value, length)."""
        values: list[B] = []
        counts: list[int] = []
        for value, count in runs:
            if values and values[-1] == value:
                counts[-1] += count
            elif count:
                values.append(value)
                counts.append(count)
        return cls._of(cls._narrow(values), _int_array([*accumulate(counts)]))

    @classmethod
    def _narrow(cls, values: list[B]) -> array[int]:
        raise NotImplementedError

    @classmethod
    def repeat(cls, value: B, count: int) -> Self:
        """Return ``value``, ``count`` times."""
        return cls._of(cls._narrow([value]), array("i", (count,))) if count else cls()

    def runs(self) -> Iterator[tuple[B, int]]:
        """Yield (value, length) of each run."""
        begin = 0
        for value, end in zip(self._elements(), self._ends, strict=True):
            yield value, end - begin
            begin = end

    def _elements(self) -> Iterable[B]:
        """Return the value of each run."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[B]:
        return chain.from_iterable(repeat(value, count) for value, count in self.runs())

    def __contains__(self, value: object) -> bool:
        return value in self._values

    def count(self, value: object) -> int:
        """Return the number of elements that equal ``value``."""
        return sum(count for run_value, count in self.runs() if run_value == value)

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> B | Self:
        if isinstance(index, slice):
            return type(self)(tuple(self)[index])
        at = range(len(self))[index]
        return [*self._elements()][bisect_right(self._ends, at)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("runs have no array of their elements; a copy is needed")
        kind: Any = dtype or type(self)._DTYPE
        return np.repeat(np.asarray(self._values).astype(kind), _counts(self._ends))

    _DTYPE: Any

    def _joined(self, other: Self) -> Self:
        return self.of_runs(chain(self.runs(), other.runs()))


class IntRuns(_Runs[int]):
    """Integers, such as the versions of the weights, in 8 bytes per run of equal ones."""

    __slots__ = ()
    _DTYPE = np.int64

    @classmethod
    def _narrow(cls, values: list[int]) -> array[int]:
        return _int_array(values)

    def _elements(self) -> Iterable[int]:
        return self._values


class BoolRuns(_Runs[bool]):
    """Booleans, such as an action mask, in 5 bytes per run of equal ones."""

    __slots__ = ()
    _DTYPE = np.bool_

    @classmethod
    def _packed(cls, values: Iterable[Any]) -> Self:
        booleans = values.astype(np.bool_) if isinstance(values, np.ndarray) else map(bool, values)
        return super()._packed(booleans)

    @classmethod
    def _narrow(cls, values: list[bool]) -> array[int]:
        return array("b", values)

    def _elements(self) -> Iterable[bool]:
        return map(bool, self._values)


# ---- lists ---------------------------------------------------------------------------------------


class IntLists(Compact[IntArray]):
    """Lists of integers, one after another in one array."""

    __slots__ = ("_ends", "flat")
    flat: IntArray
    """The integers of all lists."""
    _ends: array[int]
    """Index in ``flat`` after the last integer of each list."""

    @classmethod
    def _of(cls, *parts: Any) -> Self:
        instance = object.__new__(cls)
        instance.flat, instance._ends = parts
        return instance

    def _parts(self) -> tuple[Any, ...]:
        return self.flat, self._ends

    @classmethod
    def _packed(cls, values: Iterable[Any]) -> Self:
        lists = [*values]
        return cls.split(IntArray([*chain.from_iterable(lists)]), map(len, lists))

    @classmethod
    def split(cls, flat: IntArray, counts: Iterable[int]) -> Self:
        """Return lists of ``counts`` integers, in order, of all those in ``flat``."""
        return cls._of(flat, _int_array([*accumulate(counts)]))

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """Number of integers in each list."""
        return _counts(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[IntArray]:
        for begin, end in zip(chain((0,), self._ends), self._ends, strict=False):
            yield self.flat[begin:end]

    @overload
    def __getitem__(self, index: int) -> IntArray: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> IntArray | Self:
        if isinstance(index, slice):
            return type(self)([*self][index])
        at = range(len(self))[index]
        return self.flat[self._ends[at - 1] if at else 0 : self._ends[at]]

    def _joined(self, other: Self) -> Self:
        return self.split(self.flat + other.flat, chain(self.counts, other.counts))
