"""Texts for people: lists, error lines and printable names."""

from everstep.base.text import error_line, first_of, listed, printable


def test_a_short_list_is_complete() -> None:
    assert listed([]) == ""
    assert listed(["m0", "m1"]) == "m0, m1"
    assert listed(range(3), 3) == "0, 1, 2"


def test_further_entries_of_a_long_list_are_counted() -> None:
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert listed(["a", "b", "c"], 2, noun="places", separator="; ") == "a; b and 1 more places"
    assert first_of(["m0", "m1"], 2000, noun="machines") == "m0, m1 and 1998 more machines"


def test_any_text_becomes_printable() -> None:
    name = b"/data/caf\xe9 \xc3\xa9".decode(errors="surrogateescape")
    assert printable(name) == "/data/caf\\xe9 é"
    assert printable("\ud800") == "\\ud800"
    assert printable("plain é") == "plain é"


TRACE = 'on m0: Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n'
ERROR = "ModuleNotFoundError: No module named 'fast'"


def test_the_error_line_has_the_error_without_the_text_after_it() -> None:
    for after in ("", "\n(exit code 1)", "\n(exit code 1)\n(1 more machine reports the same)", "\non m2: disk full"):
        assert error_line(f"{TRACE}{ERROR}{after}") == ERROR
    assert error_line("on m0: no room") == "on m0: no room"
    assert error_line("(exit code 3)") == "(exit code 3)"
    assert error_line("") == ""
    assert len(error_line("x" * 500)) == 120
