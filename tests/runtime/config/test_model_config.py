"""Settings of the model that are refused as soon as they are given."""

from __future__ import annotations

import pytest

from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError


def test_only_the_language_model_is_served() -> None:
    assert ModelConfig(language_model_only=True) == ModelConfig()
    with pytest.raises(
        ConfigError, match=r"language_model_only is False, .* not supported yet; leave it out"
    ):
        ModelConfig(language_model_only=False)
