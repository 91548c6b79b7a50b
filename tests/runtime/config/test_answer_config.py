from __future__ import annotations

import pytest

from engine.runtime.config.config_sources import from_arguments, from_flags, merge
from engine.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "count"),
    [('{"image": 4}', 4), ("image=3", 3), ("image=2,video=0", 2), ('{"image": 1, "audio": 0}', 1)],
)
def test_the_limit_of_images_in_the_form_of_vllm(value, count):
    assert merge(from_flags({"limit_mm_per_prompt": value})).config.limits.max_images == count


def test_an_object_is_taken_from_python():
    assert merge(from_arguments({"limit_mm_per_prompt": {"image": 5}})).config.limits.max_images == 5


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("7", "must be an object with a number"),
        ('{"image": "many"}', "must be an object with a number"),
        ("image", "must be an object with a number"),
        ('{"video": 2}', "has video, but only images are supported"),
        ('{"image": 0}', "max_images is 0, but it must be at least 1"),
    ],
)
def test_other_forms_are_refused(value, cause):
    with pytest.raises(ConfigError, match=cause):
        merge(from_flags({"limit_mm_per_prompt": value}))
