"""Which source a sample comes from, where several are mixed by weight.

Sources are split off one after another. At each split a share p of what arrives goes to the source, evenly spread as a
line is drawn on a grid (J. Bresenham, 1965): of the first k samples floor(k p) went there. So the source of any sample,
and its number within the source, follow from its number alone; and after any n samples each source j has had w_j n of
them, to within less than the number of sources. Shares are exact fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """Samples dealt to sources by weight. A weight is a number above zero; only their ratios count.

    A float is taken by its decimal text, so 0.3 is three tenths exactly. Raises ValueError for a weight that is not
    above zero.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        exact = [weight if isinstance(weight, Fraction) else Fraction(str(weight)) for weight in weights]
        if not exact or min(exact) <= 0:
            raise ValueError(f"weights are numbers above zero, not {list(weights)}")
        self.shares = [weight / sum(exact) for weight in exact]
        splits = [weight / sum(exact[number:]) for number, weight in enumerate(exact)]
        self.splits = [(split.numerator, split.denominator) for split in splits]

    def place(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and the sample's number within that source."""
        k = sample
        for source, (numerator, denominator) in enumerate(self.splits):
            before = k * numerator // denominator
            if (k + 1) * numerator // denominator > before:
                return source, before
            k -= before
        raise AssertionError("the last split takes all that is left")

    def counts(self, samples: int) -> list[int]:
        """How many of the first samples each source has had."""
        left, counts = samples, []
        for numerator, denominator in self.splits:
            counts.append(left * numerator // denominator)
            left -= counts[-1]
        return counts
