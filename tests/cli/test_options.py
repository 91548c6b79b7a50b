"""The flags of `engine serve`: a list that changes on purpose only, and the way from flags to a configuration."""

from __future__ import annotations

import pytest
from typer.main import get_command

from engine.cli.options import merge_options
from engine.cli.serve import app
from engine.runtime.config_fields import config_fields
from engine.runtime.errors import ConfigError

SERVE_FLAGS = """
--admission-estimator --api-key --chaos --chat-template --chunked-prefill-size --config --decision-log --device
--drain-timeout --dtype --eviction-policy --host --in-batch-prefix-caching --length-ageing --length-estimate
--load-format --log-interval --log-level --long-prefill-token-threshold --look-ahead --max-body-mb
--max-long-partial-prefills --max-loras-per-batch --max-model-len --max-num-batched-tokens --max-num-partial-prefills
--max-prefill-steps-in-a-row --max-prefill-tokens --max-queued-requests --max-running-requests --max-total-tokens
--mem-fraction --model --no-in-batch-prefix-caching --no-priority-preemption --no-radix-cache --no-strict
--num-lookahead-tokens --num-threads --page-size --phases --pin-fraction --policy-seed --port --preemption-mode
--prefill-decode-interval --print-config --priority-ageing --priority-preemption --priority-preemption-threshold
--queue-timeout --radix-cache --request-timeout --schedule-conservativeness --schedule-policy --seed
--served-model-name --startup-timeout --static-batch-size --static-batch-wait --strict --swap-space --tenant-quantum
--watchdog-timeout
"""


def settings(**given):
    return {**dict.fromkeys(config_fields()), **given}


def test_the_list_of_flags():
    """A new flag is a decision: it is for ever, and people put it into scripts."""
    options = [p for p in get_command(app).params if p.param_type_name == "option"]
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert sorted(flags) == SERVE_FLAGS.split()


def test_every_option_has_help():
    for option in get_command(app).params:
        assert getattr(option, "help", None), option.name


def test_an_option_that_is_not_given_leaves_the_file_its_say(tmp_path, monkeypatch):
    monkeypatch.delenv("ENGINE_API_KEY", raising=False)
    path = tmp_path / "engine.yaml"
    path.write_text("port: 1234\nradix_cache: false\nmodel: from-file\n")
    merged = merge_options(settings(radix_cache=True, host="::1"), config_file=path)
    assert merged.config.server.port == 1234
    assert merged.config.cache.radix_cache is True
    assert merged.config.model.model == "from-file"
    assert (merged.origins["radix_cache"], merged.origins["host"]) == ("--radix-cache", "--host")
    assert merged.origins["port"] == f"{path}:1"


def test_the_positional_model_is_the_flag():
    assert merge_options(settings(), model="m").config.model.model == "m"
    assert merge_options(settings(model="m"), model="m").config.model.model == "m"
    with pytest.raises(ConfigError, match="the model is given twice: 'a' and --model 'b'"):
        merge_options(settings(model="b"), model="a")
