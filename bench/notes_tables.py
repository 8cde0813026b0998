"""The lab notes' tables of attention's counters beside the model of them, with residuals in parts per million.

python bench/notes_tables.py [--format md]
"""

import argparse

from stepscope.recover.notes import notes_tables
from stepscope.report.formats import Format
from stepscope.report.tables import render


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", type=Format, default=Format.TEXT)
    asked = parser.parse_args()
    for table in notes_tables():
        print(render(table, asked.format))


if __name__ == "__main__":
    main()
