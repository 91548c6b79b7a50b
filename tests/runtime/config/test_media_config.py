from __future__ import annotations

import pytest

from engine.runtime.config.config_sources import from_arguments, from_flags, merge
from engine.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "pixels", "detail"),
    [
        ({"max_pixels": 1048576}, 1048576, "auto"),
        ('{"max_pixels": 50, "do_image_splitting": true}', 50, "high"),
        ('{"do_image_splitting": false}', 1, "auto"),
        ('{"min_pixels": 784, "max_pixels": 1003520}', 1003520, "auto"),
        ("{}", "auto", "auto"),
    ],
)
def test_arguments_of_processors_in_the_form_of_vllm(value, pixels, detail):
    merged = merge(from_arguments({"mm_processor_kwargs": value}))

    assert (merged.config.media.mm_max_pixels, merged.config.media.mm_detail) == (pixels, detail)


@pytest.mark.parametrize(
    "value", ["x", "[1]", '{"size": 3}', '{"max_pixels": "1"}', '{"max_pixels": true}', "7"]
)
def test_other_arguments_of_processors_are_refused(value):
    with pytest.raises(ConfigError, match="must be an object with min_pixels, max_pixels"):
        merge(from_flags({"mm_processor_kwargs": value}))


def test_words_and_numbers_of_settings():
    both = {"min_pixels": 784, "max_pixels": 1003520}
    assert merge(from_arguments({"mm_processor_kwargs": both})).config.media.mm_min_pixels == 784
    with pytest.raises(ConfigError, match=r"mm_min_pixels is 9, but it must be at most mm_max_pixels \(8\)"):
        merge(from_flags({"mm_min_pixels": "9", "mm_max_pixels": "8"}))
    with pytest.raises(ConfigError, match="mm_max_pixels is -1, but it must be at least 0"):
        merge(from_flags({"mm_max_pixels": "-1"}))
    with pytest.raises(ConfigError, match="mm-detail is 'middle', but it must be one of auto, low, high"):
        merge(from_flags({"mm_detail": "middle"}))
