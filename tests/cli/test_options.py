"""The flags of `engine serve`: a list that changes on purpose only, and the way from flags to a configuration."""

from __future__ import annotations

import pytest
from typer.main import get_command

from engine.cli.options import merge_options
from engine.cli.serve import app
from engine.runtime.config.config_fields import setting_names
from engine.runtime.errors import ConfigError

SERVE_FLAGS = """
--admin-api-key
--admission-estimator
--alias
--allow-runtime-lora
--allowed-host
--allowed-local-media-path
--allowed-media-domains
--api-key
--api-key-file
--async-scheduling
--attention-backend
--avoid-kernels
--batch-slowdown
--block-size
--body-timeout
--bootstrap-port
--chaos
--chat-template
--chat-template-file
--chunked-prefill-size
--cluster-key-file
--config
--context-length
--cors-origin
--crash-dir
--crash-dump-folder
--ctx-size
--cuda-graph
--cuda-graph-max-bs
--data-parallel-size
--decision-calibration
--decision-log
--decode-burst-ms
--deterministic
--device
--disable-cuda-graph
--disable-log-requests
--disable-overlap-schedule
--disable-radix-cache
--disaggregation-bootstrap-port
--disaggregation-fallback
--disaggregation-mode
--disaggregation-timeout
--disaggregation-transfer-backend
--dispatch-policy
--dist-init-addr
--dist-timeout
--dp
--dp-size
--drain-timeout
--dtype
--enable-chunked-prefill
--enable-log-requests
--enable-lora
--enable-mixed-chunk
--enable-prefix-caching
--enforce-eager
--eviction-policy
--executor
--grammar-timeout
--header-timeout
--hicache-storage-backend
--hicache-storage-prefetch-policy
--hicache-write-policy
--host
--in-batch-prefix-caching
--isolate-tenants
--json-closed-objects
--json-whitespace
--keep-alive-timeout
--kv-cache-dtype
--kv-disk
--kv-disk-size
--kv-events
--kv-events-config
--kv-events-replay
--kv-fetch
--kv-host-size
--kv-offloading-size
--kv-persist-salted
--kv-store
--kv-store-key
--kv-transfer-config
--kv-write
--language-model-only
--length-ageing
--length-estimate
--limit-mm-per-prompt
--load-format
--log-format
--log-interval
--log-level
--log-name
--log-requests
--logprobs-mode
--long-prefill-token-threshold
--look-ahead
--lora
--lora-modules
--lora-paths
--lora-root
--lora-target-modules
--matryoshka
--max-body-mb
--max-connections
--max-cpu-loras
--max-file-mb
--max-header-kb
--max-images
--max-json-depth
--max-json-items
--max-loaded-loras
--max-logit-bias
--max-logprobs
--max-long-partial-prefills
--max-lora-rank
--max-loras
--max-loras-per-batch
--max-messages
--max-model-len
--max-n
--max-num-batched-tokens
--max-num-partial-prefills
--max-num-seqs
--max-prefill-steps-in-a-row
--max-prefill-tokens
--max-prompts
--max-queued-requests
--max-queued-tokens
--max-recorded-bs
--max-restarts
--max-running-requests
--max-schema-kb
--max-stop-chars
--max-stop-strings
--max-tools
--max-total-tokens
--mem-fraction
--mm-cache-gb
--mm-detail
--mm-encoder-cache-tokens
--mm-max-pixels
--mm-min-pixels
--mm-processor-cache-gb
--mm-processor-kwargs
--mmproj
--model
--model-draft
--model-impl
--model-path
--multi-step-ms
--nnodes
--no-allow-runtime-lora
--no-async-scheduling
--no-cuda-graph
--no-deterministic
--no-disaggregation-fallback
--no-enable-chunked-prefill
--no-enable-log-requests
--no-enable-lora
--no-enable-mixed-chunk
--no-enable-prefix-caching
--no-in-batch-prefix-caching
--no-isolate-tenants
--no-json-closed-objects
--no-kv-persist-salted
--no-language-model-only
--no-log-requests
--no-matryoshka
--no-overlap
--no-page
--no-priority-preemption
--no-radix-cache
--no-record-steps
--no-spm-infill
--no-standby-scheduler
--no-strict
--node-rank
--num-lookahead-slots
--num-lookahead-tokens
--num-speculative-tokens
--num-threads
--one-shot-all-reduce-kib
--otlp-endpoint
--otlp-traces-endpoint
--overlap
--overload
--page
--page-size
--parallel
--phases
--pin-fraction
--pipeline-parallel-size
--policy-seed
--pooling
--port
--pp
--pp-layers
--pp-size
--preemption-mode
--prefill-decode-interval
--preset
--print-config
--priority-ageing
--priority-preemption
--priority-preemption-threshold
--priority-scheduling-preemption-threshold
--quantization
--queue-timeout
--radix-cache
--radix-eviction-policy
--random-seed
--reasoning-field
--reasoning-parser
--record-steps
--request-timeout
--response-retention
--sampling-defaults
--schedule-conservativeness
--schedule-policy
--seed
--send-timeout
--served-model-name
--shutdown-timeout
--spec-type
--speculative
--speculative-algorithm
--speculative-cache-tokens
--speculative-config
--speculative-draft-model-path
--speculative-model
--speculative-num-draft-tokens
--spm-infill
--ssl-cert-file
--ssl-certfile
--ssl-key-file
--ssl-keyfile
--standby-scheduler
--startup-timeout
--state-dir
--state-max-gb
--static-batch-size
--static-batch-wait
--strict
--swap-space
--target-step-ms
--task
--tenant-quantum
--tensor-parallel-size
--threads
--tool-call-parser
--tp
--tp-size
--transfer-backend
--watchdog-timeout
"""


def settings(**given):
    return {**dict.fromkeys(setting_names()), **given}


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


def test_other_names_are_shown_with_their_setting_only():
    options = {p.name: p for p in get_command(app).params}
    for name, setting in setting_names().items():
        assert options[name].hidden is (setting.alias is not None)  # type: ignore[attr-defined]
    help_text = options["max_running_requests"].help  # type: ignore[attr-defined]
    assert "(also --max-num-seqs)" in help_text


def test_a_switch_has_a_negation_only_if_that_stands_for_something():
    options = {p.name: p for p in get_command(app).params}
    assert options["disable_radix_cache"].secondary_opts == []
    assert options["enable_mixed_chunk"].secondary_opts == ["--no-enable-mixed-chunk"]
    assert options["enable_prefix_caching"].secondary_opts == ["--no-enable-prefix-caching"]


def test_a_switch_that_is_left_to_the_machine_says_so():
    options = {p.name: p for p in get_command(app).params}
    assert options["overlap"].help.endswith("[default: auto]")  # type: ignore[attr-defined]
    assert merge_options(settings()).config.scheduler.overlap == "auto"
    assert merge_options(settings(overlap=False)).config.scheduler.overlap is False


def test_the_positional_model_is_the_flag():
    assert merge_options(settings(), model="m").config.model.model == "m"
    assert merge_options(settings(model="m"), model="m").config.model.model == "m"
    with pytest.raises(ConfigError, match="the model is given twice: 'a' and --model 'b'"):
        merge_options(settings(model="b"), model="a")
