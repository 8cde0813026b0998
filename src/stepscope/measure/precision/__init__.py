"""What precision costs: a whole step against float64, and the smallest sums in which it shows."""
