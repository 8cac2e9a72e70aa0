"""All tiers together: write-through, promotion, and the decision to load or recompute.

``store`` joins the tiers. ``search`` and ``promotions`` bring rows of lower tiers into memory,
``tier_worker`` and ``tier_operations`` run one lower tier, ``write_queue`` and ``refresh`` write to it.
``checksums`` verifies rows. ``history`` and ``absences`` record why a row was not in memory.

Engines load rows from memory only. A lower tier that is down, slow, frozen or full of other programs' keys
delays no request: if its rows do not arrive in time, the engine computes them. A damaged or short object is a
miss and is counted.
"""
