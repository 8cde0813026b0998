"""The tables of the notes can be printed."""

from notes_tables import NOTES, notes_tables


def test_the_notes_are_reproduced_whatever_the_number_of_layers() -> None:
    lengths_and_widths, layers = notes_tables()
    assert len(lengths_and_widths.rows) == len(NOTES) == 29
    place = [column.key for column in layers.columns].index("residual_ppm")
    residuals = [row[place] for row in layers.rows]
    assert len(residuals) == 6
    assert all(isinstance(one, float) and 0 < abs(one) < 5 for one in residuals)
