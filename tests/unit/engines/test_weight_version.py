"""Names of weights: what follows what, and which of them lie behind a run's present weights."""

from __future__ import annotations

import json

import pytest

from rltool.engines.weight_version import BadWeightVersion, Lineage, WeightVersion
from rltool.rollout.serving.versions import VersionBook

RUN, OTHER = "a" * 32, "b" * 32


def test_a_version_is_its_text_and_back():
    version = WeightVersion(RUN, 2, 17)
    assert str(version) == f"{RUN}:2:17" and WeightVersion.parse(str(version)) == version


@pytest.mark.parametrize(
    "text", ["default", "", f"{RUN}:0", f"{RUN}:0:-1", f"{RUN}:00:1", f"{RUN[:-1]}:0:1", f"{RUN}:0:1 "]
)
def test_what_no_trainer_of_ours_wrote_is_no_version(text):
    with pytest.raises(BadWeightVersion, match="RUN:ATTEMPT:N"):
        WeightVersion.parse(text)


def test_later_means_the_same_run_and_a_later_attempt_or_step():
    version = WeightVersion(RUN, 1, 5)
    assert WeightVersion(RUN, 1, 6).follows(version) and WeightVersion(RUN, 2, 0).follows(version)
    assert not version.follows(version) and not WeightVersion(RUN, 0, 9).follows(version)
    assert not WeightVersion(OTHER, 1, 6).follows(version)


def test_a_runs_own_versions_are_known_up_to_the_published_one():
    lineage = Lineage(RUN, 0)
    assert str(lineage.version(3)) == f"{RUN}:0:3"
    assert [lineage.refusal(f"{RUN}:0:{n}", published=3) for n in (0, 3, 4)] == [None, None, "unpublished"]


@pytest.mark.parametrize("version", ["default", f"{OTHER}:0:1", f"{RUN}:1:0"])
def test_another_runs_versions_and_those_of_a_later_attempt_are_foreign(version):
    assert Lineage(RUN, 0).refusal(version, published=9) == "foreign"


def test_a_resumed_run_knows_the_attempt_before_up_to_its_checkpoint():
    lineage = Lineage(RUN, 0).resumed(1, 10)
    assert lineage.refusal(f"{RUN}:0:10", published=10) is None
    assert lineage.refusal(f"{RUN}:0:11", published=20) == "foreign", "weights that were discarded"
    assert lineage.refusal(f"{RUN}:1:10", published=10) is None
    assert lineage.refusal(f"{RUN}:1:11", published=10) == "unpublished"


def test_a_resume_further_back_discards_the_later_steps_of_every_attempt():
    lineage = Lineage(RUN, 0).resumed(1, 10).resumed(2, 20).resumed(3, 5)
    assert lineage.ancestors == {0: 5, 1: 5, 2: 5}
    assert lineage.refusal(f"{RUN}:0:5", published=5) is None
    assert lineage.refusal(f"{RUN}:0:10", published=5) == "foreign"
    assert lineage.refusal(f"{RUN}:2:6", published=9) == "foreign"


def test_an_attempt_that_made_no_checkpoint_is_no_ancestor():
    lineage = Lineage(RUN, 0).resumed(2, 10)  # attempt 1 went on from the same checkpoint, and wrote none
    assert lineage.refusal(f"{RUN}:1:10", published=99) == "foreign"


def test_a_lineage_is_kept_as_json():
    lineage = Lineage(RUN, 0).resumed(1, 10).resumed(4, 12)
    assert Lineage.from_json(json.loads(json.dumps(lineage.to_json()))) == lineage


# -- the book of what is published


def test_nothing_is_known_before_the_first_sync_and_a_sync_under_way_is():
    book = VersionBook(Lineage(RUN, 0))
    assert book.refusal(f"{RUN}:0:0") == "unpublished"
    assert book.begin(0) == WeightVersion(RUN, 0, 0)
    assert book.refusal(f"{RUN}:0:0") is None and book.published is None
    book.publish(0)
    assert (book.published, book.publishing) == (0, None)
    assert book.refusal(f"{RUN}:0:1") == "unpublished"


def test_a_sync_of_an_earlier_step_hides_no_later_one():
    book = VersionBook(Lineage(RUN, 0), published=5)
    book.begin(4)
    assert book.refusal(f"{RUN}:0:5") is None


def test_who_answers_with_older_weights_than_were_out_has_missed_a_sync():
    book = VersionBook(Lineage(RUN, 0).resumed(1, 3), published=4)
    assert [book.is_behind(f"{RUN}:1:{n}", 4) for n in (3, 4, 5)] == [True, False, False]
    assert book.is_behind(f"{RUN}:0:3", 3), (
        "an earlier attempt's weights of the same step: this attempt has synced since"
    )
    assert not book.is_behind("default", 4), "that is foreign, and judged as such"
