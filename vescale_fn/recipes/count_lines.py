"""Count the lines of the training program that exist only for distribution.

They carry the comment ``# mesh``; a test takes them away and runs what is left on one device. Not counted is `--check`,
which compares the two: it would be a test in another program.
"""

from __future__ import annotations

from pathlib import Path

PROGRAM = ("llama.py", "train.py", "command_line.py", "options.py")
MARKS = {"# mesh": "in the model and the training", "# mesh: start": "to start the ranks and read the command line"}


def distribution_lines(name: str) -> list[tuple[int, str, str]]:
    """The marked lines of a file of this folder: number, text and mark."""
    lines = enumerate((Path(__file__).parent / name).read_text().splitlines(), 1)
    return [
        (i, line.removesuffix("  " + mark), mark) for i, line in lines for mark in MARKS if line.endswith("  " + mark)
    ]


def main() -> None:
    """Print the lines and how many they are."""
    found = {name: distribution_lines(name) for name in PROGRAM}
    for name, lines in found.items():
        print(name, *(f"  {number:4}  {text}" for number, text, _ in lines), sep="\n")
    marks = [mark for lines in found.values() for _, _, mark in lines]
    print(
        *(f"{marks.count(mark)} lines {where}" for mark, where in MARKS.items()), f"{len(marks)} lines in all", sep="\n"
    )


if __name__ == "__main__":
    main()
