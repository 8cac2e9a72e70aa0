"""Hits lost because another pod has the keys: they are reported, and do not stop profitable growth."""

from __future__ import annotations

from lmcache_operator.autoscaling.policy.decide import decide

from tests.harness.known_demand import BY_HAND, SETTLED, STEEP, WIDE, measurements, tier


def test_profitable_growth_is_chosen_despite_routing_losses():
    without_loss, decision = (
        decide(WIDE, SETTLED, measurements(STEEP, locality_loss=loss))[0] for loss in (0.0, 0.9)
    )
    assert (decision.next, decision.limited_by) == (without_loss.next, without_loss.limited_by)
    assert decision.reason.startswith(
        f"{without_loss.reason}; 90.0 % of prompt tokens miss because another pod "
    )


def test_reason_names_routing_if_no_size_is_better_and_losses_are_high():
    decisions = [
        decide(tier(), SETTLED, measurements(BY_HAND, locality_loss=loss))[0] for loss in (0.04, 0.9)
    ]
    assert [decision.limited_by for decision in decisions] == ["Min", "Locality"]
