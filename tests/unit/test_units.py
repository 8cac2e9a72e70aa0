import pytest

from lmcache_store.common.units import format_seconds, parse_seconds, seconds_in_words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.00042, "0.42ms"), (0.0123, "12.3ms"), (0.9994, "999ms"), (0.9996, "1s"), (1.5, "1.5s"),
        (119.9, "120s"), (120, "2m"), (7199, "120m"), (7200, "2h"), (9000, "2.5h"), (86400, "24h"),
        (1234 * 86400, "1,234d"), (-0.25, "-250ms"), (-3600, "-60m"),
    ],
)  # fmt: skip
def test_durations_are_short(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 seconds"), (1, "1 second"), (99.4, "99 seconds"), (100, "2 minutes"), (3599, "60 minutes"),
        (3600, "1 hour"), (5400, "1.5 hours"), (36_000, "10 hours"), (172_800, "2 days"),
        (1234 * 86400, "1,234 days"),
    ],
)  # fmt: skip
def test_durations_in_sentences_have_words(seconds, text):
    assert seconds_in_words(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("1h30m", 5400), ("7d", 604800), ("1w", 604800), ("0s", 0)]
)
def test_duration_is_parsed(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5ms", "-5m", "1.5h", "5 m", "1234567890s", "\u0665m"])
def test_text_that_is_no_duration_has_no_seconds(text):
    assert parse_seconds(text) == 0
