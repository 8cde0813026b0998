"""The cost of low precision: a whole step against float64, and the smallest sums in which it shows."""
