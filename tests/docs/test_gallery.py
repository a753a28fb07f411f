"""The gallery of schedules: the drawing of each, its peak in flight, and the closed form of its cost."""

import pytest

from docs import generated
from fpipe.schedules import CATALOGUE
from tests.support.combinations import few


@pytest.mark.parametrize("name", few(CATALOGUE, ["seq-1f1b", "dualpipe", "vocabulary-1f1b"]))
def test_a_schedule_in_the_gallery(name):
    entry = CATALOGUE[name]
    text = "\n".join(generated.section(entry))
    assert "<svg" in text
    assert f"Cost: `{entry.cost}`, where {entry.holds}." in text
    row = text[text.index("| {py:func}") :].splitlines()[0]
    *_, peaks, _ = row.split(" | ")
    if not entry.limited:
        terms = {"p": generated.RANKS, "m": generated.MICROBATCHES, "v": entry.chunks, "s": entry.slices}
        assert max(map(float, peaks.split(", "))) == eval(entry.peak.removesuffix(" blocks"), terms)
