"""Count the lines of the training program that exist only for distribution.

They carry the comment ``# mesh``; a test takes them away and runs what is left on one device. Not counted is `--check`,
which compares the two: it would be a test in another program.
"""

from __future__ import annotations

from pathlib import Path

MARK = "# mesh"
PROGRAM = ("transformer.py", "train.py")


def distribution_lines(name: str) -> list[tuple[int, str]]:
    """The marked lines of a file of this folder, with their numbers."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [(i, line) for i, line in enumerate(lines, 1) if line.rstrip().endswith("  " + MARK)]


def main() -> None:
    """Print the lines and how many they are."""
    counts = {}
    for name in PROGRAM:
        found = distribution_lines(name)
        counts[name] = len(found)
        print(name)
        for number, line in found:
            print(f"  {number:4}  {line.rstrip().removesuffix(MARK).rstrip()}")
    print(" + ".join(f"{count} in {name}" for name, count in counts.items()), "=", sum(counts.values()), "lines")


if __name__ == "__main__":
    main()
