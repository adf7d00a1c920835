"""The results of `c * φ` and `φ₁ + φ₂`: combinations with a known prox."""

from collections.abc import Iterable

from fedstrata.prox.base import Regularizer
from fedstrata.prox.combine import On, PlusSquare, Scaled, Sum
from fedstrata.prox.sparse import SquaredL2, Zero


def scale(regularizer: Regularizer, factor: float) -> Regularizer:
    """c · φ, with c moved into the parts, so that `add` still recognises a square.

    Args:
        regularizer: φ.
        factor: c, above 0.
    """
    match regularizer:
        case SquaredL2(weight=weight):
            return SquaredL2(factor * weight)
        case PlusSquare(inner=inner, weight=weight):
            return PlusSquare(scale(inner, factor), factor * weight)
        case On(inner=inner, selectors=selectors):
            return On(scale(inner, factor), selectors)
        case Sum(parts=parts):
            return Sum([scale(part, factor) for part in parts])
        case Scaled(inner=inner, factor=before):
            return Scaled(inner, factor * before)
    return Scaled(regularizer, factor)


def add(left: Regularizer, right: Regularizer) -> Regularizer:
    """φ₁ + φ₂: squares of all leaves are taken out, squares on the same chosen leaves join their partner.

    Args:
        left: φ₁.
        right: φ₂.
    """
    (left, one), (right, two) = _split(left), _split(right)
    parts = list(_parts(left))
    for new in _parts(right):
        for place, old in enumerate(parts):
            if (joined := _joined(old, new)) is not None:
                parts[place] = joined
                break
        else:
            parts.append(new)
    if not parts:
        return SquaredL2(one + two) if one + two else Zero()
    core = parts[0] if len(parts) == 1 else Sum(parts)
    return PlusSquare(core, one + two) if one + two else core


def _split(regularizer: Regularizer) -> tuple[Regularizer, float]:
    """φ = core + ν|x|² over all leaves."""
    match regularizer:
        case SquaredL2(weight=weight):
            return Zero(), weight
        case PlusSquare(inner=inner, weight=weight):
            return inner, weight
    return regularizer, 0.0


def _parts(regularizer: Regularizer) -> Iterable[Regularizer]:
    match regularizer:
        case Zero():
            return ()
        case Sum(parts=parts):
            return parts
    return (regularizer,)


def _joined(old: Regularizer, new: Regularizer) -> Regularizer | None:
    """The sum of two parts on the same chosen leaves, if one of them has a square; else None."""
    if not (isinstance(old, On) and isinstance(new, On) and old.selectors == new.selectors):
        return None
    squares = any(_split(part.inner)[1] > 0 for part in (old, new))
    return On(add(old.inner, new.inner), new.selectors) if squares else None
