"""What is asked of the CUDA backend, and the table of what was reached. A stage's result names its bars in `bars`."""

from __future__ import annotations

from typing import Any


def bar(name: str, value: float | None, wanted: float, unit: str = "", *, at_most: bool = False) -> dict[str, Any]:
    """A row of the table: `value` should be at least `wanted`, or at most. None: it was not measured."""
    met = None if value is None else value <= wanted if at_most else value >= wanted
    return {"bar": name, "value": value, "wanted": wanted, "unit": unit, "at_most": at_most, "met": met}


def holds(name: str, value: bool) -> dict[str, Any]:
    """A bar that is met or not."""
    return {"bar": name, "value": bool(value), "wanted": True, "unit": "", "at_most": False, "met": bool(value)}


def passed(stages: dict[str, dict[str, Any]]) -> bool:
    """Whether all stages ran to their end, and no bar was missed."""
    rows = [row for r in stages.values() for row in r.get("bars", [])]
    return all(r["status"] == "done" for r in stages.values()) and all(row["met"] is not False for row in rows)


def table(stages: dict[str, dict[str, Any]]) -> list[str]:
    """The stages, and under each its bars."""
    lines = [f"{'stage / bar':<62}{'reached':>14}{'wanted':>14}  "]
    for name, r in stages.items():
        why = r.get("skipped")
        lines.append(f"{name:<62}{'skipped' if why else r['status']:>28}" + (f"  {why}" if why else ""))
        for row in r.get("bars", []):
            sign = "<=" if row["at_most"] else ">="
            wanted = "yes" if row["wanted"] is True else f"{sign} {_number(row['wanted'])}{row['unit']}"
            verdict = {True: "met", False: "MISSED", None: "not measured"}[row["met"]]
            lines.append(f"  {row['bar']:<60}{_number(row['value']) + row['unit']:>14}{wanted:>14}  {verdict}")
    rows = [row for r in stages.values() for row in r.get("bars", [])]
    counts = [sum(row["met"] is kind for row in rows) for kind in (True, False, None)]
    lines.append("{} bars met, {} missed, {} not measured".format(*counts))
    broken = [name for name, r in stages.items() if r["status"] != "done"]
    return [*lines, f"did not end well: {', '.join(broken)}"] if broken else lines


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
