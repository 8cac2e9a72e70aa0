"""Rows that another pod offers."""

import asyncio

import pytest

from tests.harness.tiered_world import NUM_COLUMNS, SIZE, World, chain, content


async def _offer(length: int) -> tuple[bool, int]:
    async with World() as world:
        (key,) = chain(1)
        world.remote.objects.update(
            {(key, column): content(key, column)[:length] for column in range(NUM_COLUMNS)}
        )
        is_taken = await world.store.take_over(key, length, "remote")
        return is_taken, world.lookup([key]).num_resident


def test_offered_row_is_a_hit():
    assert asyncio.run(_offer(SIZE)) == (True, 1)


@pytest.mark.parametrize("length", [0, 16, SIZE - 1, 2 * SIZE])
def test_row_of_another_length_is_refused(length):
    """An engine reads a whole chunk. After a shorter row, it would read what was in the slot before."""
    assert asyncio.run(_offer(length)) == (False, 0)
