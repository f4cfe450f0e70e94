"""The figures of docs/reliability.md, out of what `make faults` tried last.

python -m benchmarks.faults
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
FIGURES = Path(__file__).with_name("faults.json")
PLACE = re.compile(r"(<!-- benchmarks/faults -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    print(table())
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """The page with the figures as the file has them."""
    return PLACE.sub(lambda found: found[1] + table() + found[2], page)


def table(figures: dict[str, Any] | None = None) -> str:
    if figures is None and not FIGURES.exists():
        return "\nNo figures yet: `make faults` makes them.\n\n"
    said = json.loads(FIGURES.read_text(encoding="utf-8")) if figures is None else figures
    rows = "".join(f"| {what} | {count:,} |\n" for what, count in said["tried"].items())
    return (
        f"\n`make faults` on {said['cores']} cores, Python {said['python']}: {said['tests']} tests in "
        f"{said['minutes']:g} minutes, none failed.\n\n| tried | times |\n|---|--:|\n{rows}\n"
    )


if __name__ == "__main__":
    main()
