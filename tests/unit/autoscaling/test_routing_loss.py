"""Hits that are lost because another pod holds the keys: they are said, and stop no growth that pays."""

from __future__ import annotations

from lmcache_operator.autoscaling.decide import decide

from tests.unit.autoscaling.test_decide import BY_HAND, OLD, STEEP, WIDE, seen, tier


def test_growth_that_pays_is_made_although_routing_loses_more():
    alone, decision = (decide(WIDE, OLD, seen(STEEP, locality_loss=loss))[0] for loss in (0.0, 0.9))
    assert (decision.next, decision.limited_by) == (alone.next, alone.limited_by)
    assert decision.reason.startswith(f"{alone.reason}; 90.0 % of prompt tokens miss because another pod ")


def test_routing_is_named_where_no_size_is_better_and_much_is_lost():
    found = [decide(tier(), OLD, seen(BY_HAND, locality_loss=loss))[0] for loss in (0.04, 0.9)]
    assert [decision.limited_by for decision in found] == ["Min", "Locality"]
