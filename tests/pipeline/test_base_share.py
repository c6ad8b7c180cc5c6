"""Which of the due bases a tier leaves out, and what it never does."""

from __future__ import annotations

from stepwell.pipeline.base_share import BaseShare


def fed(share: BaseShare, first: int, last: int, each_bytes: int) -> None:
    for step in range(first, last + 1):
        share.saved(step)
        share.encoded(step, each_bytes)


def test_first_base_is_always_taken():
    assert BaseShare(2.0, 50).takes(0, 100, needed=False)


def test_due_base_is_left_out_until_the_log_is_long_enough():
    share = BaseShare(2.0, 50)
    share.takes(0, 100, needed=True)
    fed(share, 1, 4, 30)
    assert not share.takes(5, 100, needed=False)
    fed(share, 5, 6, 30)
    assert not share.takes(7, 100, needed=False), "180 bytes of 200"
    fed(share, 7, 7, 30)
    assert share.takes(8, 100, needed=False)
    fed(share, 9, 9, 30)
    assert not share.takes(10, 100, needed=False), "it counts from the base before"


def test_base_that_is_needed_is_taken_and_counts_anew():
    share = BaseShare(2.0, 50)
    share.takes(0, 100, needed=True)
    fed(share, 1, 6, 30)
    assert share.takes(7, 100, needed=True)
    fed(share, 8, 8, 30)
    assert not share.takes(9, 100, needed=False)


def test_after_so_many_saves_none_is_left_out():
    share = BaseShare(1000.0, 5)
    share.takes(0, 100, needed=True)
    fed(share, 1, 3, 1)
    assert not share.takes(4, 100, needed=False)
    fed(share, 4, 4, 1)
    assert share.takes(5, 100, needed=False)


def test_what_is_encoded_late_belongs_to_the_chain_before():
    share = BaseShare(1.0, 50)
    share.takes(0, 100, needed=True)
    fed(share, 1, 3, 50)
    assert share.takes(4, 100, needed=False)
    share.encoded(4, 1000)  # the differential beside the base
    assert not share.takes(5, 100, needed=False)


def test_base_after_a_lost_one_is_taken():
    share = BaseShare(2.0, 50)
    share.takes(0, 100, needed=True)
    assert not share.takes(1, 100, needed=False)
    share.lost()
    assert share.takes(2, 100, needed=False)


def test_no_budget_means_every_base():
    share = BaseShare(0.0, 50)
    assert all(share.takes(step, 100, needed=False) for step in range(5))
