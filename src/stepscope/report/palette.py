"""What all pictures share: colours that colour-blind readers tell apart, greys that stay behind the data, one font."""

# Okabe and Ito (2008), strongest contrast on white first; their yellow vanishes on white, and grey stands in for it.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
# The same hues, light enough to stand on a dark page.
LINES_ON_DARK = ("#4AA3DF", "#EF7F36", "#2DBE94", "#DD94BC", "#F0B03A", "#7CC8F2", "#D8D8D8", "#A3A3A3")
# For areas that lie on one another: neighbours differ in lightness too, and grey stands in for black, on which nothing
# could be written.
AREAS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
INK, FAINT, GRID, FRAME = "#222222", "#5f5f5f", "#e3e3e3", "#9a9a9a"
FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif"
