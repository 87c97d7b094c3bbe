"""When another run's weights on one of our engines are news, and when the engine is left to it."""

from __future__ import annotations

import pytest

from rltool.rollout.serving.foreign import ForeignWeights

RUN, OTHER, ENGINE = "a" * 32, "b" * 32, "http://e:1"
THEIRS = f"{OTHER}:0:5"


class Watch(ForeignWeights):
    def __init__(self):
        self.now = 0.0
        super().__init__(RUN, lambda: self.now)

    def sync(self, at):
        self.now = at
        self.synced([ENGINE])


@pytest.fixture
def watch():
    return Watch()


def test_what_an_engine_brings_along_is_no_news(watch):
    assert watch.observed_version(ENGINE, THEIRS, sent_at=1) is None


def test_a_foreign_version_in_place_of_ours_is_news_once_and_names_the_other_run(watch):
    watch.sync(at=10)
    news = watch.observed_version(ENGINE, THEIRS, sent_at=11)
    assert (news.times, news.given_up) == (1, False)
    assert f"another trainer uses the engine {ENGINE}" in str(news) and OTHER in str(news)
    assert watch.observed_version(ENGINE, THEIRS, sent_at=12) is None, "it was said"


def test_the_second_time_the_engine_is_left_to_the_other(watch):
    watch.sync(at=10)
    watch.observed_version(ENGINE, THEIRS, sent_at=11)
    watch.sync(at=20)
    news = watch.observed_version(ENGINE, f"{OTHER}:0:6", sent_at=21)
    assert (news.times, news.given_up) == (2, True)
    assert "this run leaves the engine to it" in str(news)


def test_each_engine_is_counted_by_itself(watch):
    watch.sync(at=10)
    watch.synced(["http://e:2"])
    assert watch.observed_version(ENGINE, THEIRS, sent_at=11).times == 1
    assert watch.observed_version("http://e:2", THEIRS, sent_at=11).times == 1


def test_what_was_sent_before_our_last_sync_may_bear_what_it_replaced(watch):
    watch.sync(at=10)
    watch.observed_version(ENGINE, THEIRS, sent_at=11)
    watch.sync(at=20)
    assert watch.observed_version(ENGINE, THEIRS, sent_at=19) is None
    assert watch.observed_version(ENGINE, THEIRS, sent_at=20) is not None


@pytest.mark.parametrize("version", [f"{RUN}:0:3", f"{RUN}:4:9", "default", "incomplete", None])
def test_our_own_versions_and_nobodys_are_no_other_trainer(watch, version):
    watch.sync(at=10)
    assert watch.observed_version(ENGINE, version, sent_at=11) is None
    assert watch.observed_version(ENGINE, THEIRS, sent_at=12) is not None, "and the watch goes on"
