"""Names of geometric figures by their points, and which of them name the same figure.

math-verify would read ``AC`` as a product of two symbols, ``\\angle ABC`` as a product of four, and
``\\overline{AC}`` as one symbol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from burnish.model_text import Form, Pattern

Kind = Literal["angle", "segment", "ray", "triangle"]

_NAMES: dict[str, Kind] = {
    **dict.fromkeys(("angle", "measuredangle", "∠", "∡"), "angle"),
    **dict.fromkeys(("overline", "bar", "segment", "overleftrightarrow", "line"), "segment"),
    **dict.fromkeys(("overrightarrow", "vec", "vector", "ray"), "ray"),
    **dict.fromkeys(("triangle", "△"), "triangle"),
}
_LONGEST = 60
_NOISE = Pattern(r"\\[,;:! ]|\\(?:text|mathrm)(?=\{)|[\s${}*]")
_POINT = Pattern(r"[A-Z]'?")
_FIGURE = Form(
    rf"(?i:the)?\\?(?i:(?P<name>{'|'.join(_NAMES)}))?(?P<points>(?:[A-Z]'?){{2,3}})",
    longest=_LONGEST,
)


@dataclass(frozen=True)
class Figure:
    """An angle, segment, line, ray, vector or triangle. Two points without a sign (``AC``) are a
    segment or its length."""

    kind: Kind
    points: tuple[str, ...]

    def equals(self, other: Figure) -> bool:
        """Return whether both name the same figure. An angle has its vertex in the middle; rays and
        vectors begin at their first point."""
        if self.kind != other.kind:
            return False
        if self.kind == "ray":
            return self.points == other.points
        if self.kind == "angle":
            return other.points in (self.points, self.points[::-1])
        return sorted(self.points) == sorted(other.points)


def read_figure(text: str) -> Figure | None:
    r"""Return the figure that an entire text names, or None.

    >>> read_figure(r"$\angle ABC$.")
    Figure(kind='angle', points=('A', 'B', 'C'))
    >>> read_figure("CA"), read_figure("ABC"), read_figure(r"\overline{ABC}")
    (Figure(kind='segment', points=('C', 'A')), None, None)
    """
    if len(text) > _LONGEST:
        return None
    match = _FIGURE.fullmatch(_NOISE.sub("", text).rstrip("."))
    if match is None:
        return None
    name, points = match["name"], tuple(_POINT.findall(match["points"]))
    kind = _NAMES[name.lower()] if name else "segment"
    num_points = 3 if kind in ("angle", "triangle") else 2
    return Figure(kind, points) if len(points) == num_points else None
