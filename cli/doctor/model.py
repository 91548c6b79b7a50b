"""The checks of `ModelFacts`, and the arithmetic of the memory check."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from typing import Final

from ...launch.resolve.drafter import MAX_DRAFT_COST, draft_cost, resolve_drafter
from ...launch.resolve.host_facts import HostFacts
from ...launch.resolve.image_limits import with_image_limits
from ...launch.resolve.memory_budget import capacity_of, plan_memory, size_text
from ...launch.resolve.model_resolution import text_only
from ...launch.resolve.mtp import with_mtp
from ...launch.resolve.pool_size import largest_step_of
from ...launch.resolve.resolve import resolve
from ...launch.resolve.stages import least_bubble, stage_spec, stages_of
from ...launch.resolve.transformers_support import TIMES_SLOWER
from ...models.source import ModelSource
from ...models.spec.model_spec import ModelSpec, with_quantization
from ...models.spec.quantization import BLOCK_METHODS
from ...models.spec.sizes import BYTES_OF_DTYPE
from ...models.weight_files.weight_memory import num_parameters
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.feasibility import pages_for
from ...runtime.text import counted
from .check import Check, fail, ok, refused, skip, warn
from .model_facts import SAMPLES, ModelFacts

CONTEXTS: Final = (1024, 4096, 16384, 65536)
"""Lengths for which the number of concurrent requests is printed."""
_CODES: Final = ("model", "task", "weights", "checksums", "tokenizer", "template", "turns", "fit")


def check_model(facts: ModelFacts, config: EngineConfig, host: HostFacts) -> Iterator[Check]:
    """All checks, in the order of the report."""
    if facts.not_fetched:
        yield ok("model", f"not here yet; the first start fetches {facts.not_fetched}")
        for code in _CODES[1:]:
            yield skip(code, "the model is not here yet")
        return
    yield check_files(facts)
    if facts.source is None:
        for code in _CODES[1:]:
            yield skip(code, "there are no files to check")
        return
    yield check_task(facts)
    yield check_weights(facts)
    yield check_checksums(facts)
    yield check_tokenizer(facts)
    yield check_template(facts)
    yield check_turns(facts)
    spec = facts.spec
    if config.scheduler.speculative_model is not None:
        if spec is None:
            yield skip("drafter", "the architecture is not known")
        else:
            check, config, spec = check_drafter(facts.source, spec, config)
            yield check
    yield (
        skip("fit", "the architecture is not known")
        if spec is None
        else check_fit(spec, config, host, facts.source)
    )


def check_files(facts: ModelFacts) -> Check:
    """Check that the files exist and that the engine supports their architecture; say which code computes it."""
    if facts.source is None:
        return refused("model", facts.source_error)
    if facts.spec is None:
        return refused("model", facts.spec_error)
    spec = facts.spec
    way = "natively"
    if facts.in_transformers and spec.encoder is None:
        way = f"through transformers' code, about {TIMES_SLOWER:g} times slower"
    return ok(
        "model",
        f"{facts.source.name}: {spec.model_type}, {spec.num_layers} layers, {num_parameters(spec) / 1e6:,.0f} million "
        f"parameters, {spec.known_positions} positions; runs {way}",
    )


def check_task(facts: ModelFacts) -> Check:
    """Say what the model does, and how it makes vectors or scores."""
    if facts.spec is None:
        return skip("task", "the architecture is not known")
    pooling = facts.spec.pooling
    vision = facts.spec.vision
    if pooling is None and vision is None:
        if facts.no_tower:
            text, _, fix = facts.no_tower.rpartition("; ")
            return warn("task", f"generate text, not of images: {text}", fix)
        return ok("task", "generate text")
    if pooling is None:
        assert vision is not None
        text = f"generate text, of images too: {vision.rows_per_tile} tokens an image"
        if vision.most_tiles > 1:
            text = f"generate text, of images too: {vision.rows_per_tile} tokens a tile, 1 to {vision.most_tiles} tiles"
        if side := vision.row_pixels:
            most = vision.processing.max_pixels // side**2
            text = (
                f"generate text, of images too: a token for {side} x {side} pixels, at most {most:,} an image"
            )
        if facts.source is not None and facts.source.tower:
            text += f"; the tower is {os.path.basename(facts.source.tower)}"
        if importlib.util.find_spec("PIL") is None:
            return warn("task", f"{text}; but Pillow, the extra vision, is missing", "pip install pillow")
        return ok("task", text)
    what = f"{pooling.task}: {pooling.pooling} pooling, "
    if pooling.task == "embed":
        what += f"vectors of {counted(pooling.size, 'number')}{', of length 1' if pooling.normalize else ''}"
    elif pooling.label_tokens:
        what += f"probability of {pooling.label_tokens[0]!r} as the next token"
    else:
        what += f"{counted(pooling.size, 'score')} ({pooling.activation})"
    prompts = ", ".join(name for name, text in pooling.prompts.items() if text)
    limit = f"texts of at most {counted(facts.spec.known_positions, 'token')}"
    return ok("task", f"{what}; {limit}; prompts: {prompts or 'none'} ({pooling.reason})")


def check_weights(facts: ModelFacts) -> Check:
    """Check that every tensor that the model needs is in the files."""
    if facts.weights_error or facts.values_error:
        return refused("weights", facts.weights_error or facts.values_error)
    if facts.spec is None:
        return skip("weights", "the architecture is not known")
    if facts.weights is None:
        return skip("weights", "random weights are asked for")
    weights = facts.weights
    files = counted(weights.num_files, "file")
    text = f"{weights.num_tensors} tensors in {files}, {size_text(weights.num_bytes)}, all there"
    if only := text_only(facts.spec, weights):
        text += f"; serves {only}"
    return ok("weights", text)


def check_images(spec: ModelSpec, config: EngineConfig, host: HostFacts, product_flops: float) -> Check:
    """Say how long an image takes, by the measured rate of products on the CPU; 0: on a GPU it is not measured."""
    try:
        media = resolve(config, spec, host).config.media
    except ConfigError:
        return skip("images", "see the check above")
    folder = media.allowed_local_media_path
    if folder is not None and not os.path.isdir(folder):
        fix = "make it, or leave --allowed-local-media-path out"
        return fail("images", f"allowed_local_media_path is {folder!r}, which is no folder", fix)
    vision = with_image_limits(spec, media).vision
    assert vision is not None
    tile_s = vision.flops_per_tile(spec.hidden_size) / product_flops if product_flops else 0.0
    text = f"tiles of {vision.image_size} pixels"
    if tile_s:
        text = f"encoding a tile of {vision.image_size} pixels takes about {tile_s:.2g} s here"
    if vision.row_pixels:
        most, shown = vision.processing.max_pixels, vision.shown_pixels
        text = f"images of at most {most:,} pixels, see --mm-max-pixels"
        text += f"; encoding one of {shown:,} takes about {tile_s:.2g} s here" if tile_s else ""
        text += f"; detail {media.mm_detail} if a request states none"
    elif vision.most_tiles > 1:
        text += f", the largest image {vision.most_tiles} tiles"
        text += f" and {vision.most_tiles * tile_s:.2g} s" if tile_s else ""
        text += f"; detail {media.mm_detail} if a request states none"
    elif spec.vision is not None and spec.vision.most_tiles > 1:
        text += f"; an image is one tile, see --mm-max-pixels ({media.mm_max_pixels})"
    if hosts := media.allowed_media_domains:
        text += f"; fetches from {', '.join(hosts)}"
    if folder is not None:
        text += f"; any client may read images below {folder}"
    return ok("images", text, tile_s=tile_s)


def check_checksums(facts: ModelFacts) -> Check:
    """Check that the files equal the published ones."""
    wrong = [each for each in facts.checksums if each.found != each.published]
    if wrong:
        names = ", ".join(each.path for each in wrong)
        return fail(
            "checksums",
            f"not as published: {names}, SHA-256 {wrong[0].found[:12]}... instead of {wrong[0].published[:12]}...",
            "delete it and fetch the model again",
        )
    if not facts.checksums:
        return skip("checksums", "none is known, or --no-checksums")
    return ok(
        "checksums", f"SHA-256 as published: {', '.join(os.path.basename(c.path) for c in facts.checksums)}"
    )


def check_tokenizer(facts: ModelFacts) -> Check:
    """Check that encoding and decoding return the same text, and that the model has all tokens of the tokenizer."""
    if facts.tokenizer_error and facts.tokenizer_error == facts.spec_error:  # a GGUF file holds both
        return skip("tokenizer", "the file cannot be read")
    if facts.tokenizer_error or facts.vocab_size is None:
        return refused("tokenizer", facts.tokenizer_error)
    if facts.spec is not None and facts.vocab_size > facts.spec.vocab_size:
        return warn(
            "tokenizer",
            f"it has {facts.vocab_size} tokens, the model {facts.spec.vocab_size}: prompts with the others are refused",
            "use the tokenizer that belongs to the weights",
        )
    if facts.spec is not None and facts.spec.pooling is not None:
        return ok("tokenizer", f"{facts.vocab_size} tokens")
    if facts.changed_samples:
        sample, became = facts.changed_samples[0]
        return warn(
            "tokenizer",
            f"{len(facts.changed_samples)} of {len(SAMPLES)} texts come back changed: {sample!r} as {became!r}",
            "expect that of a tokenizer that folds case or Unicode; else fetch its files again",
        )
    return ok("tokenizer", f"{facts.vocab_size} tokens; texts come back as they were")


def check_template(facts: ModelFacts) -> Check:
    """Check that the chat template renders a chat."""
    if facts.tokenizer_error:
        return skip("template", "the tokenizer cannot be read")
    if facts.template_error:
        return refused("template", facts.template_error)
    if facts.spec is not None and facts.spec.pooling is not None:
        return skip("template", "the model generates no text")
    if facts.no_template:
        text, _, fix = facts.no_template.partition("; ")
        return warn(
            "template",
            f"the model {text}: /v1/chat/completions will refuse",
            f"{fix}, or use the instruction-tuned version of the model",
        )
    return ok("template", "the chat template renders")


def check_turns(facts: ModelFacts) -> Check:
    """Check that generation ends where the chat template ends a turn."""
    if facts.tokenizer_error or facts.template_error or facts.no_template:
        return skip("turns", "there is no chat template")
    if facts.spec is None:
        return skip("turns", "the architecture is not known")
    if facts.spec.pooling is not None:
        return skip("turns", "the model generates no text")
    if facts.endless_turn:
        text, _, fix = facts.endless_turn.rpartition("; ")
        return warn("turns", text, fix)
    return ok("turns", "answers end where the chat template ends a turn")


def check_drafter(
    source: ModelSource, spec: ModelSpec, config: EngineConfig
) -> tuple[Check, EngineConfig, ModelSpec]:
    """Check that the second model drafts for this one, and estimate a draft; also what the memory check needs.

    Decoding is bound by the weights that it reads, or by their products, which are as many: so a draft costs as much of
    a step as its weights are of the model's.
    """
    try:
        resolved, spec, notes = resolve_drafter(config, source, spec, fetch=False)
    except ConfigError as error:
        plain = dataclasses.replace(config.scheduler, speculative="off", speculative_model=None)
        return refused("drafter", str(error)), dataclasses.replace(config, scheduler=plain), spec
    drafter, scheduler = spec.drafter, resolved.scheduler
    if drafter is None:
        why = notes["speculative"]
        return warn("drafter", f"{why}: auto drafts without it", "use a smaller one"), resolved, spec
    width = BYTES_OF_DTYPE["bfloat16" if config.model.dtype == "auto" else config.model.dtype]
    cost = draft_cost(config, spec, drafter)
    kv_bytes = 2 * width * sum(each.num_kv_heads * each.head_dim for each in drafter.heads)
    what = "a draft model of the same vocabulary" if scheduler.speculative == "draft" else "an EAGLE-3 head"
    text = (
        f"{scheduler.speculative_model}: {what}; weights {size_text(drafter.weights_bytes)}, KV {size_text(kv_bytes)} "
        f"per token; a draft costs about {cost:.0%} of a step"
    )
    if scheduler.speculative_len is not None:
        text += f"; no drafts beyond {scheduler.speculative_len} positions"
    if cost > MAX_DRAFT_COST:
        fix = "use a smaller one, or --speculative suffix"
        return (
            warn("drafter", f"{text}, which does not pay: measured times will turn drafts off", fix),
            resolved,
            spec,
        )
    return ok("drafter", text, weights_bytes=drafter.weights_bytes, step_share=round(cost, 4)), resolved, spec


def kept_in_blocks(spec: ModelSpec, config: EngineConfig, host: HostFacts) -> ModelSpec | None:
    """The architecture as it would run here, if its weights are kept in blocks; else None."""
    try:
        quantization = resolve(config, spec, host).config.model.quantization
    except ConfigError:
        return None  # the line of the arithmetic says why
    spec = with_quantization(spec, quantization)
    found = spec.quantization
    return spec if found is not None and found.method in BLOCK_METHODS and found.kept else None


def check_fit(
    spec: ModelSpec, config: EngineConfig, host: HostFacts, source: ModelSource | None = None
) -> Check:
    """Check that weights and KV memory fit with these settings; with `source`, those of a drafter, too."""
    try:
        if source is not None:
            config, spec = with_mtp(config, source, spec)
        resolved = resolve(config, with_quantization(spec, config.model.quantization), host)
    except ConfigError as error:
        return refused("fit", str(error))
    effective = resolved.config
    spec = with_quantization(spec, effective.model.quantization)
    capacity = capacity_of(effective, spec)
    model, cache = effective.model, effective.cache
    assert cache.mem_fraction != "auto" and model.dtype != "auto", "the configuration is resolved"
    stages = stages_of(spec, effective.parallel)
    plan = partial(
        plan_memory,
        usable_bytes=host.mem_usable_bytes,
        dtype=model.dtype,
        fraction=cache.mem_fraction,
        step_tokens=largest_step_of(effective),
        max_model_len=capacity.max_model_len,
        max_running_requests=capacity.max_running_requests,
        on_cpu=model.device == "cpu",
        tp=effective.parallel.tp,
        kv_cache_dtype=cache.kv_cache_dtype,
    )
    weights = [plan(stage_spec(spec, stage), stage=stage).weights_bytes for stage in stages]
    weights_text = " + ".join(map(size_text, weights))
    if len(stages) > 1:
        layers = " + ".join(str(stage.end - stage.first) for stage in stages)
        weights_text += (
            f" in stages of {layers} layers that wait {least_bubble(spec, stages):.0%} of the time"
        )
    lengths = [length for length in CONTEXTS if length < capacity.max_model_len] + [capacity.max_model_len]
    at_once = {
        length: min(
            capacity.max_running_requests, capacity.num_pages // pages_for(length, capacity.page_size)
        )
        for length in lengths
    }
    requests = ", ".join(f"{count} of {length}" for length, count in at_once.items())
    drafts = "" if spec.mtp_layer is None else "; drafts with its own layer that predicts further tokens"
    return ok(
        "fit",
        f"{model.dtype} on {model.device}: weights {weights_text}, KV "
        f"{size_text(capacity.kv_token_bytes)} per token, {capacity.max_total_tokens} tokens, context "
        f"{capacity.max_model_len}; requests at once: {requests} tokens{drafts}",
        weights_bytes=sum(weights),
        stage_weights_bytes=weights,
        kv_token_bytes=capacity.kv_token_bytes,
        max_total_tokens=capacity.max_total_tokens,
        max_model_len=capacity.max_model_len,
        requests_at_once={str(length): count for length, count in at_once.items()},
        why=dict(resolved.notes),
    )
