"""Stop strings, however a text is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.generation.stops import StopStrings

TEXT = "aab aaab abc\n\nb bca aabc"


@pytest.mark.parametrize("stops", [[], ["b"], ["aaab"], ["c\n\n", "never"], ["aab a", "ab "], ["abcd"], ["aabc", ""], ["bd", "bc"]])
def test_a_text_ends_before_the_stop_string_that_is_complete_first(stops):
    places = [(TEXT.find(stop) + len(stop), TEXT.find(stop)) for stop in stops if stop and stop in TEXT]
    expected = TEXT[: min(places)[1]] if places else TEXT
    for seed in range(40):
        cuts = sorted(np.random.default_rng(seed).integers(0, len(TEXT) + 1, 9).tolist())
        found, shown = StopStrings(stops), ""
        for begin, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
            shown += found.feed(TEXT[begin:end])
            assert expected.startswith(shown)
        assert found.met == bool(places)
        assert shown + found.finish() == expected


def test_only_what_may_begin_a_stop_string_is_held_back():
    found = StopStrings(["stop", "top hat"])
    assert [found.feed(piece) for piece in ("ab", "c st", "o", "o", "to", "p")] == ["ab", "c ", "", "stoo", "", ""]
    assert (found.finish(), found.met) == ("top", False)
