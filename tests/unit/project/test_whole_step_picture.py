"""Bars of the whole step: they add up to it, on both sides."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks.whole_step_picture import bars, picture

RLTOOL = {"step": 9.3, "wait": 0.3, "generate": 5.0, "logprobs": 2.7, "train": 8.8, "sync": 0.1}
TRL = {"step": 22.8, "generate": 13.1, "logprobs": 2.3, "train": 7.1, "sync": 0.1}


def output(**result):
    return "\n".join(["max_staleness 1 step 9.3", json.dumps({"shape": "1.5B", **result}), ""])


def test_parts_add_up_to_the_step_whoevers_it_is():
    [(ours, of_ours)] = bars(output(**{"max_staleness 1": RLTOOL}))
    [(theirs, of_theirs)] = bars(output(mode="server", float32=TRL))
    assert (ours, theirs) == ("1.5B, rltool, staleness 1", "1.5B, TRL, float32")
    assert sum(of_ours.values()) == pytest.approx(9.3) and of_ours["training"] == pytest.approx(6.1)
    assert sum(of_theirs.values()) == pytest.approx(22.8) and of_theirs["training"] == pytest.approx(7.1)


def test_the_picture_is_xml_with_a_bar_for_each_run_as_long_as_its_step():
    rows = [*bars(output(**{"max_staleness 1": RLTOOL})), *bars(output(mode="server", float32=TRL))]
    root = ET.fromstring(picture(rows))
    drawn = [float(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")][5:]
    assert sum(drawn[5:]) / sum(drawn[:5]) == pytest.approx(22.8 / 9.3, rel=0.01)


def test_a_benchmark_that_did_not_end_is_told():
    with pytest.raises(ValueError, match="did not end"):
        list(bars("step 1\n"))
