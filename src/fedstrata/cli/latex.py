r"""LaTeX of the docstrings, made readable in a terminal. Light: a table of symbols and a few shapes."""

import re
import unicodedata

_SYMBOLS = {
    **dict(zip(
        ["alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "eta", "theta", "lambda", "mu", "nu", "xi", "pi",
         "zeta", "rho", "sigma", "tau", "phi", "varphi", "psi", "omega", "Delta", "Phi", "Omega"],
        "αβγδεεηθλμνξπζρστφφψωΔΦΩ", strict=True)),
    "nabla": "∇", "sum": "Σ", "prod": "Π", "gets": "←", "to": "→", "leftarrow": "←", "in": "∈", "sim": "∼", "ell": "ℓ",
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "cdot": "·", "times": "×", "approx": "≈", "infty": "∞", "top": "ᵀ",
    "circ": "∘", "cdots": "⋯", "Pi": "Π", "vartheta": "ϑ", "varrho": "ϱ",
    "partial": "∂", "langle": "⟨", "rangle": "⟩", "|": "‖", "dots": "…", "ldots": "…", "mathbb E": "E",
}  # fmt: skip
_SILENT = ("big", "Big", "bigl", "bigr", "left", "right", "textstyle", "displaystyle", "limits")
_BRACED = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_WIDE = "\u2003"  # stands for a wide gap until narrow ones are closed
_MARKS = {"bar": "\u0304", "hat": "\u0302", "tilde": "\u0303"}  # over the letter before them
_HIGH = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def readable(text: str) -> str:
    r"""A formula, or prose with $formulas$, as plain text.

    >>> readable(r"$x_i \gets x_i - \eta_a \nabla f_i(x_i; \xi_i)$, then average.")
    'x_i ← x_i - η_a ∇f_i(x_i; ξ_i), then average.'
    >>> readable(r"\frac{x - x_i}{\eta Q} + \sqrt{v} + \Delta^2")
    '(x - x_i)/(η Q) + √v + Δ²'
    >>> readable(r"\hat\eta \bar y + \tfrac{1}{\gamma}")
    'η̂ ȳ + 1/γ'
    >>> readable(r"\frac{\mu}{4t} \sqrt a")
    'μ/(4t) √a'

    Args:
        text: LaTeX.
    """
    text = re.sub(r"\\(?:text|mathrm|mathbf|mathcal|mathbb|operatorname)\s*" + _BRACED, r"\1", text)
    text = re.sub(r"\\(bar|hat|tilde)\s*(\\[A-Za-z]+|[A-Za-z])", lambda m: m[2] + _MARKS[m[1]], text)
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    for _ in range(3):  # fractions inside fractions
        text = re.sub(rf"\\frac(?:\s*{_BRACED}\s*{_BRACED}|(\d)(\d))", _fraction, text)
    text = re.sub(rf"\\sqrt(?:\s*{_BRACED}| ([A-Za-z]))", lambda m: "√" + (m[2] or _wrapped(m[1])), text)
    text = re.sub(rf"\\({'|'.join(_SILENT)})(?![A-Za-z])\s*", "", text)
    text = re.sub(r"\\(?:qquad|quad)(?![A-Za-z])", _WIDE, text)
    text = re.sub(r"\\[,;:! ]", " ", text)
    text = re.sub(r"\\([A-Za-z]+|\|)( ?)", _symbol, text)
    text = re.sub(rf"([_^]){_BRACED}", lambda m: m[1] + _wrapped(m[2]), text)
    text = re.sub(r"\^(\d)", lambda m: m[1].translate(_HIGH), text)
    text = text.replace("^ᵀ", "ᵀ")
    text = re.sub(r"\\([{}])", r"\1", text.replace("$", ""))
    text = re.sub(rf" *{_WIDE} *", "   ", re.sub(" +", " ", text)).strip()
    return unicodedata.normalize("NFC", text)


def formulas(docstring: str) -> list[str]:
    r"""The displayed formulas of a docstring, one line each.

    >>> formulas(r"Text. $$ x \gets y, \qquad y \gets z $$ More.")
    ['x ← y', 'y ← z']

    Args:
        docstring: the text.
    """
    blocks = re.findall(r"\$\$(.*?)\$\$", docstring, flags=re.DOTALL)
    parts = [re.sub(r"\s+", " ", part) for block in blocks for part in re.split(r"\\qquad|,\s*\\quad", block)]
    return [readable(part).rstrip(",").strip() for part in parts if part.strip()]


def _wrapped(inside: str) -> str:
    """Brackets only where leaving them out would change what is read."""
    inside = inside.strip()
    return inside if re.fullmatch(r"\\?\w+|\|\w+\||\(.*\)", inside) else f"({inside})"


def _fraction(match: re.Match) -> str:
    over, under = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
    under = f"({under})" if re.fullmatch(r"\d+[A-Za-z]", under) else _wrapped(under)  # μ/(4t) is not μ/4 t
    return f"{_wrapped(over)}/{under}"


def _symbol(match: re.Match) -> str:
    name, space = match[1], match[2]
    if name not in _SYMBOLS:
        return name + space  # min, log, sign, ... are words already
    return _SYMBOLS[name] + ("" if name in ("nabla", "partial", "|") else space)
