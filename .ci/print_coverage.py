"""Print the share of lines that the last test run executed, by package.

Lines that numba compiles run outside Python, so they are marked and not counted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from coverage import Coverage

SOURCE = Path("src/roost")


def main() -> None:
    """Read the data of the last run and print a table."""
    measured = Coverage()
    measured.load()
    lines: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for name in measured.get_data().measured_files():
        _, statements, _, missing, _ = measured.analysis2(name)
        package = Path(name).relative_to(SOURCE.absolute()).parts[0]
        for key in (package, "all"):
            lines[key] += len(statements)
            missed[key] += len(missing)
    for key in sorted(lines, key=lambda key: (key == "all", key)):
        if lines[key]:
            share = 100 * (1 - missed[key] / lines[key])
            print(f"{key:16}{lines[key]:7} lines {missed[key]:6} missed {share:6.1f} %")


if __name__ == "__main__":
    main()
