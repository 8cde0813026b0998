"""Two steps on one scale, cut at the same places: each place starts at the same x in both, and takes the room of the
longer one.

Between the two bars is the change: a segment as long as the difference, under the end of the longer one. Adjacent
places that would be too narrow to see are drawn as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from string import ascii_lowercase

from stepscope.findings.compared import AlignedSteps, PlaceTime, StepChange, StepPlace
from stepscope.render.drawing.axes import find_ticks
from stepscope.render.drawing.brackets import BOLD, NARROW, Bracket, define_hatch, draw_brackets
from stepscope.render.drawing.colours import Palette
from stepscope.render.drawing.svg import Bounds, Canvas, Sign, Text, fit, place_signs, width_of
from stepscope.render.formats import clean
from stepscope.render.numbers import format_change, format_ms, format_tick

_MS = 1e6
_BAR, _CHANGE, _GAP = 38.0, 15.0, 3.0
_LABEL_SIZE, _TEXT_SIZE, _HEAD_SIZE, _LEADING = 10.5, 12.0, 13.0, 17.0
_LEAST = 0.003  # of the whole width: narrower places are joined
_LEAST_PHASE = 0.004  # of the whole width: narrower phases have no name
_MOST_SIGNS = 7
_SAME = ("same", "noise")
# The kinds of change, as the legend calls them.
_KINDS = {"shorter": "shorter", "gone": "gone", "longer": "longer", "new": "new", "noise": "within noise"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceBlock:
    """Adjacent places of one phase that are drawn as one, from `start_ns` on."""

    places: tuple[StepPlace, ...]
    start_ns: int

    @property
    def phase(self) -> str:
        return self.places[0].phase

    def total_ns(self, run: int) -> int:
        return sum(place.sides[run].total_ns for place in self.places)

    @property
    def change_ns(self) -> int:
        return self.total_ns(1) - self.total_ns(0)

    @property
    def width_ns(self) -> int:
        return sum(place.width_ns for place in self.places)

    @property
    def verdict(self) -> str:
        """The verdict that all places share. Several that differ are longer or shorter together, unless most of their
        change is noise."""
        verdicts = {place.verdict for place in self.places}
        if len(verdicts) == 1:
            return verdicts.pop()
        noise_ns, all_ns = (
            sum(abs(place.change_ns) for place in self.places if place.verdict in some)
            for some in (_SAME, (*_SAME, *verdicts))
        )
        return "noise" if 2 * noise_ns > all_ns else "slower" if self.change_ns > 0 else "faster"

    def side(self, run: int) -> PlaceTime:
        times: dict[str, int] = {}
        for place in self.places:
            side = place.sides[run]
            for name, time in zip(side.classes, side.times_ns, strict=True):
                times[name] = times.get(name, 0) + time
        order = sorted(times, key=lambda name: (-times[name], name))
        idle_ns = sum(place.sides[run].idle_ns for place in self.places)
        return PlaceTime(classes=tuple(order), times_ns=tuple(times[name] for name in order), idle_ns=idle_ns)


def cut_blocks(steps: AlignedSteps) -> list[PlaceBlock]:
    """Return the blocks of the chart; their numbers are those of the marks."""
    least_ns = _LEAST * sum(place.width_ns for place in steps.places)
    blocks: list[PlaceBlock] = []
    start = 0
    for _, inside in groupby(steps.places, key=lambda place: place.phase):
        places = list(inside)
        pending, wide, rest = [], 0, sum(place.width_ns for place in places)
        for place in places:
            pending.append(place)
            wide, rest = wide + place.width_ns, rest - place.width_ns
            if place is places[-1] or (wide >= least_ns and rest >= least_ns):
                blocks.append(PlaceBlock(places=tuple(pending), start_ns=start))
                start += wide
                pending, wide = [], 0
    return blocks


# --- in words -------------------------------------------------------------------------------------------------------


def describe_steps(steps: AlignedSteps) -> str:
    """Return the chart as sentences, for readers who do not see it."""
    totals = steps.steps_ns
    said = [f"{clean(run)}: {format_ms(time)}" for run, time in zip(steps.runs, totals, strict=True)]
    phases = [f"{clean(name, 40)} {_say_change(change)}" for name, change in _sum_phases(steps).items() if name]
    changes = [f"{_prefix(steps, one)}{clean(one.text)} {_say_change(one.change_ns)}" for one in steps.changes]
    sentences = [f"{'; '.join(said)}: change {_say_change(totals[1] - totals[0])}."]
    sentences += [f"By phase: {', '.join(phases)}."] if phases else []
    sentences += [f"Largest changes: {'; '.join(changes)}."] if changes else []
    return " ".join(sentences)


def name_block(block: PlaceBlock) -> str:
    """Return `backward, layer 3 attention`, or the first and the last of several places."""
    names = [place.name for place in block.places if place.name]
    inside = names[0] if len(set(names)) == 1 else f"{names[0]} to {names[-1]}" if names else ""
    return ", ".join(clean(part, 80) for part in (block.phase, inside) if part)


def _say_change(change_ns: int) -> str:
    return format_change("ms", change_ns / _MS)


def _sum_phases(steps: AlignedSteps) -> dict[str, int]:
    sums: dict[str, int] = {}
    for place in steps.places:
        sums[place.phase] = sums.get(place.phase, 0) + place.change_ns
    return sums


def _prefix(steps: AlignedSteps, change: StepChange) -> str:
    phase = steps.places[change.places[0]].phase
    return f"{clean(phase, 40)}, " if phase else ""


# --- the drawing ----------------------------------------------------------------------------------------------------


def place_aligned_steps(canvas: Canvas, steps: AlignedSteps, width: float, hatch: str) -> Bounds:
    """Draw both bars, the change between them and its labels in `width` pixels. Each block is a group with its
    number. `hatch` is the id of the pattern of idle time, unique in its document."""
    define_hatch(canvas, hatch)
    blocks = cut_blocks(steps)
    scale = width / max(1, sum(place.width_ns for place in steps.places))
    y = _draw_heading(canvas, steps, 0, 9.0, width, scale)
    y = draw_brackets(canvas, _list_brackets(canvas, blocks, scale, width), y, width)
    y = _number_layers(canvas, blocks, scale, y)
    first, change = y, y + _BAR + _GAP
    second = change + _CHANGE + _GAP
    for at, block in enumerate(blocks):
        left = block.start_ns * scale
        for run, top in enumerate((first, second)):
            _draw_side(canvas, block, run, left, top, scale, hatch)
        _draw_change(canvas, block, left, change, scale)
        with canvas.group(class_="mark", data_mark=at):
            right = max(left + block.width_ns * scale, left + 1)
            canvas.add("rect", x=left, y=first, width=right - left, height=second + _BAR - first, fill="transparent")
    letters = _choose_letters(steps)
    y = _draw_letters(canvas, steps, letters, scale, second + _BAR)
    y = _draw_heading(canvas, steps, 1, y + 14, width, scale)
    y = _write_changes(canvas, steps, letters, y + 14, width)
    y = place_signs(canvas, _list_signs(canvas, steps, hatch), left=0.0, top=y + 8, width=width)
    y = _place_kinds(canvas, steps, y, width)
    return Bounds(left=0.0, top=0.0, right=width, bottom=y)


def _draw_heading(canvas: Canvas, steps: AlignedSteps, run: int, y: float, width: float, scale: float) -> float:
    """Write the run and its step time; the second one with a bar that gives the scale: x is not the time of either."""
    what = "per step" if steps.unit == "step" else "in the trace"
    text = f"{clean(steps.runs[run], 60)}: {format_ms(steps.steps_ns[run])} {what}"
    room = width
    if run:
        length = find_ticks(0.0, width / scale / _MS, 12)[1]
        left, right, stroke = width - length * _MS * scale, width, canvas.palette.faint
        label = Text(x=left - 6, y=y, text=f"{format_tick(length)} ms", align="end", colour=stroke)
        canvas.trace([(left, y - 4), (left, y), (right, y), (right, y - 4)], stroke, 1.2)
        canvas.write([label])
        room = label.x - width_of(label.text, label.size) - 8
    canvas.write([Text(x=0, y=y, text=fit(text, room / BOLD, _HEAD_SIZE), size=_HEAD_SIZE, bold=True)])
    return y + 12


def _list_brackets(canvas: Canvas, blocks: Sequence[PlaceBlock], scale: float, width: float) -> list[Bracket]:
    brackets = []
    for phase, inside in groupby(blocks, key=lambda block: block.phase):
        own = list(inside)
        left, right = own[0].start_ns * scale, (own[-1].start_ns + own[-1].width_ns) * scale
        if phase and right - left >= _LEAST_PHASE * width:
            times = [format_ms(sum(block.total_ns(run) for block in own)) for run in (0, 1)]
            change_ns = sum(block.change_ns for block in own)
            both = f"{times[0].removesuffix(' ms')} → {times[1]}"
            values = (f"{times[0].removesuffix(' ms')} →", times[1]) if width < NARROW else (both,)
            lines = (clean(phase, 40), *values, _say_change(change_ns))
            is_noise = all(block.verdict in _SAME for block in own)
            last = canvas.palette.faint if is_noise else canvas.palette.change(change_ns)
            colours = (*[""] * (len(lines) - 1), last)
            brackets.append(Bracket.over(lines, left, right, colours))
    return brackets


def _number_layers(canvas: Canvas, blocks: Sequence[PlaceBlock], scale: float, y: float) -> float:
    """Write the number of each layer above it, as far as they have room. Return the lower edge."""
    free, drawn = -1.0, False
    places = [place for block in blocks for place in block.places]
    start = 0
    for (_, layer), inside in groupby(places, key=lambda place: (place.phase, place.layer)):
        wide = sum(place.width_ns for place in inside)
        left, right = start * scale, (start + wide) * scale
        start += wide
        text = layer.rpartition(" ")[2].rpartition(".")[2]
        half = width_of(text, _LABEL_SIZE) / 2
        centre = (left + right) / 2
        if text.isdecimal() and centre - half >= free and right - left >= 3:
            canvas.write(
                [Text(x=centre, y=y + 5, text=text, align="middle", size=_LABEL_SIZE, colour=canvas.palette.faint)]
            )
            free, drawn = centre + half + 5, True
    return y + (13 if drawn else 0)


def _draw_side(canvas: Canvas, block: PlaceBlock, run: int, left: float, top: float, scale: float, hatch: str) -> None:
    """Draw what one run does in a block, and a line where it does nothing while the other one does."""
    side, x = block.side(run), left
    for name, time in (*zip(side.classes, side.times_ns, strict=True), ("", side.idle_ns)):
        if time:
            fill = canvas.palette.fill(name) if name else f"url(#{hatch})"
            canvas.box(x, top, x + time * scale, top + _BAR, fill)
            x += time * scale
    end = left + block.width_ns * scale
    if end - x > 1:
        middle = top + _BAR / 2
        canvas.line(x, middle, end, middle, canvas.palette.frame, 1.0)
    if end - left > 5:
        canvas.line(left, top, left, top + _BAR, canvas.palette.paper, 0.8)


def _draw_change(canvas: Canvas, block: PlaceBlock, left: float, top: float, scale: float) -> None:
    """Draw a segment as long as the change, where the longer of the two goes on alone."""
    change_ns = block.change_ns
    if not change_ns:
        return
    start = left + min(block.total_ns(0), block.total_ns(1)) * scale
    end = start + abs(change_ns) * scale
    fill = _fill_change(canvas.palette, _name_change(block.verdict, change_ns))
    canvas.box(start, top, max(end, start + 0.4), top + _CHANGE, fill)
    text = _say_change(change_ns)
    if width_of(text, _LABEL_SIZE) + 4 <= end - start:
        middle = Text(x=(start + end) / 2, y=top + _CHANGE / 2, text=text, align="middle", size=_LABEL_SIZE)
        canvas.write([middle])


def _place_kinds(canvas: Canvas, steps: AlignedSteps, y: float, width: float) -> float:
    """Draw the legend of the changes; return the lower edge."""
    found = {_name_change(place.verdict, place.change_ns) for place in steps.places if place.change_ns}
    if not found:
        return y
    palette, left = canvas.palette, width_of("Change:", _TEXT_SIZE) + 12
    signs = [Sign(fill=_fill_change(palette, kind), text=text) for kind, text in _KINDS.items() if kind in found]
    canvas.write([Text(x=0, y=y + 10, text="Change:", size=_TEXT_SIZE)])
    return place_signs(canvas, signs, left=left, top=y + 10, width=width - left)


def _name_change(verdict: str, change_ns: int) -> str:
    if verdict in ("new", "gone"):
        return verdict
    return "noise" if verdict in _SAME else "longer" if change_ns > 0 else "shorter"


def _fill_change(palette: Palette, kind: str) -> str:
    if kind == "noise":
        return palette.frame
    return palette.change(1 if kind in ("longer", "new") else -1, pale=kind in ("longer", "shorter"))


def _choose_letters(steps: AlignedSteps) -> list[str]:
    """A letter for each change at a single place; the others are at many, and have none."""
    letters = iter(ascii_lowercase)
    return [next(letters) if len(change.places) == 1 else "" for change in steps.changes]


def _draw_letters(canvas: Canvas, steps: AlignedSteps, letters: Sequence[str], scale: float, y: float) -> float:
    """Write each letter below its place, those that would overlap as one text. Return the lower edge."""
    if not any(letters):
        return y
    starts = [0, *accumulate(place.width_ns for place in steps.places)]
    marks = []
    for change, letter in zip(steps.changes, letters, strict=True):
        if letter:
            at = change.places[0]
            marks.append(((starts[at] + starts[at + 1]) / 2 * scale, letter))
            canvas.mark("up", marks[-1][0], y + 6, 3.5, fill=canvas.palette.change(change.change_ns))
    texts: list[Text] = []
    size = BOLD * _LABEL_SIZE
    for x, letter in sorted(marks):
        written = texts[-1] if texts else None
        if written and x - written.x < (width_of(written.text, size) + width_of(letter, size)) / 2 + 2:
            texts[-1] = replace(written, text=f"{written.text}, {letter}")
        else:
            texts.append(Text(x=x, y=y + 17, text=letter, align="middle", size=_LABEL_SIZE, bold=True))
    canvas.write(texts)
    return y + 20


def _write_changes(canvas: Canvas, steps: AlignedSteps, letters: Sequence[str], y: float, width: float) -> float:
    """Write the largest changes as rows of two columns: the time, and where. Return the lower edge."""
    if not steps.changes:
        return y
    canvas.write([Text(x=0, y=y, text="Largest changes", size=_TEXT_SIZE, bold=True)])
    texts = [_say_change(one.change_ns) for one in steps.changes]
    room = max(width_of(text, _TEXT_SIZE) for text in texts) + 16
    columns = 1 if width < NARROW else 2
    rows = -(-len(texts) // columns)
    for at, (change, text) in enumerate(zip(steps.changes, texts, strict=True)):
        column, row = divmod(at, rows)
        left, level = column * width / columns, y + (row + 1) * _LEADING
        colour = canvas.palette.change(change.change_ns)
        named = f"{letters[at]}: " if letters[at] else ""
        where = f"{named}{_prefix(steps, change)}{clean(change.text)}"
        fitted = fit(where, width / columns - room - 8, _TEXT_SIZE)
        canvas.write(
            [
                Text(x=left + room - 10, y=level, text=text, align="end", size=_TEXT_SIZE, colour=colour),
                Text(x=left + room, y=level, text=fitted, size=_TEXT_SIZE),
            ]
        )
    return y + rows * _LEADING + 14


def _list_signs(canvas: Canvas, steps: AlignedSteps, hatch: str) -> list[Sign]:
    """Return the legend: the classes that take most time, and idle time."""
    times: dict[str, int] = {}
    for place in steps.places:
        for side in place.sides:
            for name, time in zip(side.classes, side.times_ns, strict=True):
                times[name] = times.get(name, 0) + time
    order = sorted(times, key=lambda name: (-times[name], name))
    palette = canvas.palette
    signs = [Sign(fill=palette.fill(name), text=clean(name, 30) or "other") for name in order[:_MOST_SIGNS]]
    signs += [Sign(fill=palette.faint, text=f"{len(order) - _MOST_SIGNS} more")] if len(order) > _MOST_SIGNS else []
    signs.append(Sign(fill=f"url(#{hatch})", text=clean(steps.idle, 30)))
    return signs
