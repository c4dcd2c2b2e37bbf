"""The table that ends a measurement: each row a figure, its peer, what is wanted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Series = Sequence[float]


@dataclass(frozen=True)
class Row:
    """`ours` and `peer` are medians of the rounds; `ratio` is that of their ratios."""

    measure: str
    ours: float
    peer: float | None
    ratio: float | None
    wanted: str
    met: bool | None
    unit: str


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    regressions: list[str] = field(default_factory=list)

    def at_least(
        self, wanted: float, gross: float, measure: str, *series: Series, unit: str
    ) -> None:
        """Ours must be `wanted` times the peer's; below `gross` the bench fails."""
        ratio = self._compare(measure, series, unit, f"≥ {wanted}", wanted.__le__)
        self._judge(ratio >= gross, f"{measure}: {ratio:.2f} x the peer's")

    def at_most(
        self, wanted: float, gross: float, measure: str, *series: Series, unit: str
    ) -> None:
        """Ours may be `wanted` times the peer's; above `gross` the bench fails."""
        ratio = self._compare(measure, series, unit, f"≤ {wanted}", wanted.__ge__)
        self._judge(ratio <= gross, f"{measure}: {ratio:.2f} x the peer's")

    def limit(
        self, wanted: float, gross: float, measure: str, ours: float, unit: str
    ) -> None:
        """A figure with a limit of its own and no peer."""
        said, met = f"≤ {wanted} {unit}", ours <= wanted
        self.rows.append(Row(measure, ours, None, None, said, met, unit))
        self._judge(ours <= gross, f"{measure}: {ours:.1f} {unit}")

    def _judge(self, passes: bool, words: str) -> None:
        if not passes:
            self.regressions.append(words)

    def check(self) -> None:
        """Fail, once all is in the table, for what is far from what it was."""
        found, self.regressions = self.regressions, []
        assert not found, "; ".join(found)

    def show(self, measure: str, *series: Series, unit: str) -> None:
        """A comparison of which nothing is wanted, to read the others by."""
        self._compare(measure, series, unit, "", None)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def _compare(
        self,
        measure: str,
        series: Sequence[Series],
        unit: str,
        wanted: str,
        met: Callable[[float], bool] | None,
    ) -> float:
        ours, peer = series
        ratio = statistics.median(a / b for a, b in zip(ours, peer, strict=True))
        middles = statistics.median(ours), statistics.median(peer)
        good = met(ratio) if met else None
        self.rows.append(Row(measure, *middles, ratio, wanted, good, unit))
        return ratio

    def text(self) -> str:
        lines = [("measure", "ours", "peer", "ratio", "wanted", "")]
        lines += [_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*shown, *(f"* {note}" for note in self.notes)])

    def write(self, path: Path) -> None:
        kept = {"rows": [asdict(row) for row in self.rows], "notes": self.notes}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def _cells(row: Row) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:,.4g} {row.unit}"

    verdict = {True: "ok", False: "missed", None: ""}[row.met]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return (row.measure, figure(row.ours), figure(row.peer), ratio, row.wanted, verdict)
