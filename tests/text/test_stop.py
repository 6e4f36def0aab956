import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_jax.errors import PromptError
from flashmoe_jax.text import StopScanner


def run(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stop)
    shown = "".join(scanner.push(piece) for piece in pieces)
    return shown + scanner.finish(), scanner.is_stopped


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "is_stopped"),
    [
        ([], ["ab", "c"], "abc", False),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", True),
        (["END"], ["x E", "N", "D y"], "x ", True),
        (["END"], ["x E", "N", "E"], "x ENE", False),
        (["aab"], ["aa", "ab"], "a", True),
        (["abc", "b"], ["abc"], "a", True),
        (["END"], ["x EN"], "x EN", False),
    ],
)
def test_text_ends_before_the_stop_string(stop: list[str], pieces: list[str], shown: str, is_stopped: bool):
    assert run(stop, pieces) == (shown, is_stopped)


@settings(deadline=None)
@given(stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), text=st.text("abc", max_size=20))
def test_the_cut_into_pieces_does_not_matter(stop: list[str], text: str):
    shown, is_stopped = run(stop, list(text))
    assert run(stop, [text]) == (shown, is_stopped)
    assert text.startswith(shown)
    assert not any(s in shown for s in stop)
    assert is_stopped == any(s in text for s in stop)


def test_what_cannot_begin_a_stop_string_is_not_held_back():
    scanner = StopScanner(["END"])
    assert scanner.push("so E") == "so "
    assert scanner.push("x") == "Ex"


def test_nothing_comes_after_the_stop():
    scanner = StopScanner("x")
    assert scanner.push("ax") == "a"
    assert scanner.push("b") == ""
    assert scanner.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(PromptError, match="stop string is empty"):
        StopScanner(["a", ""])
