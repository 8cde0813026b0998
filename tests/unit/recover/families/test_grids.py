from stepscope.recover.facts import Elements, Gather, Rows, Window, exactly
from stepscope.recover.families.grids import (
    covered,
    factor,
    first_enclosed,
    join_choices,
    join_windows,
    keep_stored,
    meet,
    split_arguments,
    take_apart,
    whole_number,
)


def test_the_last_block_can_be_partial() -> None:
    assert covered(3, 128) == Window(257, 384)
    assert covered(1, 128) == Window(1, 128)
    assert covered(3, 128, 16) == Window(272, 384, 16)


def test_arguments_are_split_at_the_outermost_commas() -> None:
    assert split_arguments("4, f<a, b>(c, d)::{lambda(e, g)#1}, h") == ("4", "f<a, b>(c, d)::{lambda(e, g)#1}", "h")
    assert split_arguments("f(a)->b<c, d>, e") == ("f(a)->b<c, d>", "e")
    assert split_arguments("") == ()
    assert first_enclosed("f<a, b> >(c, d)") == "f<a, b> "
    assert first_enclosed("f<a, b>, c>") == "f<a, b>"
    assert first_enclosed("f") == "f"


def test_mangled_names_have_no_arguments() -> None:
    assert take_apart("vectorized_elementwise_kernel")[1] == ()
    assert take_apart("_ZN2at6native3fooILi4EfEEvi")[1] == ()
    assert take_apart("void at::native::foo<4, float>(int)")[1] == ("4", "float")


def test_only_short_integers_are_parsed() -> None:
    assert [whole_number(text) for text in ("16", "-1", "T1", "", "²", "9" * 12)] == [16, None, None, None, None, None]


def test_windows_meet_and_join() -> None:
    assert meet(Window(10, 20), Window(15, 30)) == Window(15, 20)
    assert meet(Window(10, 20), Window(21, 30)) is None
    assert meet(Window(10, 40), Window(4, 64, 12)) == Window(16, 40, 12)
    assert meet(Window(17, 27), Window(4, 64, 12)) is None
    assert join_windows([Window(1, 4), Window(9, 16)]) == Window(1, 16)
    assert join_windows([exactly(8), exactly(24), exactly(32)]) == Window(8, 32, 8)
    assert join_windows([Window(8, 24, 8), exactly(28)]) == Window(8, 28, 4)
    assert join_windows([exactly(8)]) == exactly(8)


def test_stored_bytes_choose_among_sizes_by_the_window() -> None:
    assert keep_stored([Window(900, 1024)], 2000, (1, 2, 4, 8)) == (exactly(1000),)
    assert keep_stored([Window(1, 1024)], 2000, (2, 4)) == (exactly(500), exactly(1000))
    assert keep_stored([Window(500, 512), Window(900, 1024)], 2000, (2,)) == (exactly(1000),)
    assert keep_stored([Window(900, 1024)], 2000, (4,)) == (Window(900, 1024),)
    assert keep_stored([Window(900, 1024)], None, (2,)) == (Window(900, 1024),)


def test_choices_join_to_a_fact_that_always_holds() -> None:
    assert join_choices([]) is None
    assert join_choices([Elements(count=exactly(3)), Elements(count=exactly(5))]) == Elements(count=Window(3, 5, 2))
    known = Rows(rows=exactly(3), width=Window(4, 7))
    assert join_choices([known, Rows(rows=exactly(5), width=exactly(9))]) == Rows(
        rows=Window(3, 5, 2), width=Window(4, 9)
    )
    assert join_choices([known, Rows(rows=exactly(5))]) == Rows(rows=Window(3, 5, 2))
    lookups = [Gather(rows=exactly(3), width_bytes=exactly(16)), Gather(rows=exactly(3), width_bytes=exactly(32))]
    assert join_choices(lookups) == Gather(rows=exactly(3), width_bytes=Window(16, 32, 16))


def test_factors_are_pairs_within_both_windows() -> None:
    assert factor(600, Window(2, 4), Window(100, 250)) == (
        Rows(rows=exactly(3), width=exactly(200)),
        Rows(rows=exactly(4), width=exactly(150)),
    )
    assert factor(601, Window(2, 4), Window(1, 1000)) == ()
