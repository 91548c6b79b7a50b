"""Each fault of a model's files, and of settings that do not fit, gives exactly its line; the files are real ones."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cli.doctor.check import CheckStatus
from engine.cli.doctor.model import check_checksums, check_model, check_task
from engine.cli.doctor.model_facts import SAMPLES, Checksum, ModelFacts, gather_model
from engine.runtime.config.config_sources import from_arguments, merge

from .conftest import GIB, host

WARN, FAIL, OK, SKIP = CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.OK, CheckStatus.SKIP


def examine(model, on=None, **settings):
    config = merge(from_arguments({"model": str(model)} | settings)).config
    facts = gather_model(config.model, with_torch=True, with_checksums=True)
    return list(check_model(facts, config, on or host()))


def not_well(checks):
    return [check for check in checks if not check.is_well]


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A model of one file, for a test to break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def sharded(model: Path) -> Path:
    """The same in two files and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, model / shard)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_is_well(sharded):
    checks = examine(sharded)
    assert not_well(checks) == []
    assert [(c.code, c.verdict) for c in checks] == [
        ("model", OK),
        ("task", OK),
        ("weights", OK),
        ("checksums", SKIP),
        ("tokenizer", OK),
        ("template", OK),
        ("turns", OK),
        ("fit", OK),
    ]
    assert "in 2 files" in checks[2].text


def truncated(model):
    path = model / "model-00002-of-00002.safetensors"
    cut(path, path.stat().st_size - 7)


def header_cut(model):
    cut(model / "model-00001-of-00002.safetensors", 40)


def header_damaged(model):
    path = model / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[8:10] = b"}{"
    path.write_bytes(data)


def shard_missing(model):
    (model / "model-00002-of-00002.safetensors").unlink()


def shard_empty(model):
    cut(model / "model-00002-of-00002.safetensors", 0)


def index_broken(model):
    (model / "model.safetensors.index.json").write_text("{")


def pickles_only(model):
    for path in model.glob("model*"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"x")


def config_broken(model):
    (model / "config.json").write_text('{"model_type": ')


def config_without_layers(model):
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))


def no_tokenizer(model):
    (model / "tokenizer.json").unlink()


def tokenizer_broken(model):
    (model / "tokenizer.json").write_text("{}")


def tokenizer_of_another_model(model):
    config = json.loads((model / "tokenizer.json").read_text())
    last = config["added_tokens"][-1]
    config["added_tokens"] += [last | {"id": 5000 + i, "content": f"<|other{i}|>"} for i in range(20)]
    (model / "tokenizer.json").write_text(json.dumps(config))


def tokenizer_that_folds(model):
    edit(model / "tokenizer.json", normalizer={"type": "Lowercase"})


def several_templates(model):
    edit(model / "tokenizer_config.json", chat_template={"rag": "{{ 1 }}", "alpha": "{{ 2 }}"})


def no_template(model):
    edit(model / "tokenizer_config.json", chat_template=None)


def template_broken(model):
    edit(model / "tokenizer_config.json", chat_template="{% for m in messages %}\n{{ m.role }")


def turn_without_end(model):
    edit(model / "config.json", eos_token_id=0)
    edit(model / "tokenizer_config.json", eos_token=None)


def template_raises(model):
    edit(model / "tokenizer_config.json", chat_template="{{ raise_exception('never') }}")


FILE_FAULTS = [
    (
        truncated,
        "weights",
        FAIL,
        r"00002-of-00002.safetensors: truncated: tensor .* ends at byte",
        "download",
    ),
    (header_cut, "weights", FAIL, "00001-of-00002.safetensors: truncated", "download it again"),
    (header_damaged, "weights", FAIL, "the header is damaged", "download it again"),
    (shard_empty, "weights", FAIL, "cannot be read", "download it again"),
    (
        shard_missing,
        "model",
        FAIL,
        "1 of 2 weight files are missing, first model-00002",
        "download them again",
    ),
    (index_broken, "model", FAIL, "index.json: not valid JSON", "download it again"),
    (pickles_only, "model", FAIL, "only pickled weights", "safetensors"),
    (config_broken, "model", FAIL, "config.json: not valid JSON", "download it again"),
    (config_without_layers, "model", FAIL, "num_hidden_layers", ""),
    (no_tokenizer, "tokenizer", FAIL, "there is no tokenizer.json", "copy it"),
    (tokenizer_broken, "tokenizer", FAIL, "not a valid tokenizer", "download it again"),
    (tokenizer_of_another_model, "tokenizer", WARN, "the model 272", "belongs to the weights"),
    (tokenizer_that_folds, "tokenizer", WARN, "1|2|3 of 4 texts come back changed: 'The quick", "folds case"),
    (no_template, "template", WARN, "no chat template", "--chat-template"),
    (several_templates, "template", WARN, "several chat templates, alpha, rag", "--chat-template alpha"),
    (
        turn_without_end,
        "turns",
        WARN,
        "ends a turn with '<.im_end.>', which is no end token",
        "add 2 to eos_token_id",
    ),
    (template_broken, "template", FAIL, "syntax error in line 2", "--chat-template"),
    (template_raises, "template", FAIL, "cannot render these messages: never", "check their roles"),
]


@pytest.mark.parametrize(
    ("break_it", "code", "verdict", "text", "fix"), FILE_FAULTS, ids=[row[0].__name__ for row in FILE_FAULTS]
)
def test_each_fault_of_the_files_is_its_own_line(sharded, break_it, code, verdict, text, fix):
    break_it(sharded)
    (check,) = not_well(examine(sharded))
    assert (check.code, check.verdict) == (code, verdict)
    assert re.search(text, check.text), check.text
    assert fix in check.fix


FIT_FAULTS = [
    ({"max_model_len": 4096}, {}, "knows positions up to 1024 only", "lower --max-model-len"),
    ({}, {"mem_available_bytes": GIB // 2}, "memory holds a context of", "raise --mem-fraction"),
    ({"max_total_tokens": 10**12}, {}, "takes .* but memory holds", "lower --max-total-tokens"),
    ({"device": "cuda"}, {}, "no NVIDIA driver or GPU is visible", "use --device cpu"),
    ({"tp": 3}, {}, "tp is 3", ""),
    ({"overlap": True, "multi_step_ms": 25.0}, {}, "overlap is on", "omit --multi-step-ms"),
]


@pytest.mark.parametrize(("settings", "on", "text", "fix"), FIT_FAULTS)
def test_settings_that_do_not_fit_are_the_line_of_the_arithmetic(model, settings, on, text, fix):
    (check,) = not_well(examine(model, host(**on), **settings))
    assert (check.code, check.verdict) == ("fit", FAIL)
    assert re.search(text, check.text), check.text
    assert fix in check.fix


def test_the_arithmetic_is_that_of_a_start(model):
    (check,) = [c for c in examine(model, max_total_tokens=4096, dtype="float32") if c.code == "fit"]
    details = check.details
    assert (
        details["kv_token_bytes"] == 2 * 2 * 2 * 8 * 4
    )  # keys and values, layers, KV heads, head dim, float32
    assert (details["max_total_tokens"], details["max_model_len"]) == (4096, 1024)
    assert details["requests_at_once"] == {"1024": 4}
    assert "4096 tokens, context 1024; requests at once: 4 of 1024 tokens" in check.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere", "there is no such folder or .gguf file"),
        ("notes.txt", "not a GGUF file"),
        ("empty", "no config.json"),
        ("damaged.gguf", "truncated|damaged"),
    ],
)
def test_what_is_no_model_is_said_and_the_rest_is_not_looked_at(tmp_path, name, text):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes(4))
    checks = examine(tmp_path / name)
    check = not_well(checks)[0]
    assert (check.code, check.verdict) == ("model", FAIL)
    assert re.search(text, check.text), check.text


@pytest.mark.parametrize("name", ["~nobodyhere/model", "x" * 5000])
def test_what_cannot_even_be_looked_for_is_said(name):
    check = not_well(examine(name))[0]
    assert (check.code, check.verdict) == ("model", FAIL)
    assert re.search("there is no such folder|too long", check.text), check.text


def test_files_of_another_user_are_said(monkeypatch, model):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied", "/hers/model")

    monkeypatch.setattr(Path, "is_dir", refuse)
    check = not_well(examine(model))[0]
    assert (check.code, check.text) == ("model", "/hers/model: cannot be read: Permission denied")


def test_a_model_that_is_not_here_yet_is_not_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    checks = examine("default")
    assert not_well(checks) == []
    assert checks[0].text == "not here yet; the first start fetches the default model, 89 MiB"
    assert {c.verdict for c in checks[1:]} == {SKIP}
    assert list(tmp_path.iterdir()) == []


def test_a_hub_model_that_is_not_here_yet_is_not_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    checks = examine("some-org/some-model")
    assert checks[0].text == "not here yet; the first start fetches some-org/some-model, from the hub"


def test_files_of_the_hubs_cache_are_compared_with_their_names(model, tmp_path):
    weights = model / "model.safetensors"
    blob = tmp_path / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    checks = {check.code: check for check in examine(model)}
    assert checks["checksums"].text == "SHA-256 as published: model.safetensors"

    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    (check,) = not_well(examine(model))
    assert (check.code, check.verdict, check.fix) == (
        "checksums",
        FAIL,
        "delete it and fetch the model again",
    )


def test_all_parts_of_a_split_model_are_compared_with_their_names(tmp_path):
    parts = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        content = b"GGUF" + part.name.encode()
        blob = tmp_path / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        part.symlink_to(blob)
    config = merge(from_arguments({"model": str(parts[0])})).config.model
    facts = gather_model(config, with_torch=False, with_checksums=True)
    assert [checksum[0] for checksum in facts.checksums] == list(map(str, parts))


def test_a_checksum_that_differs_shows_both():
    good, bad = Checksum("/m/a", "a" * 64, "a" * 64), Checksum("/m/b", "a" * 64, "b" * 64)
    check = check_checksums(ModelFacts(checksums=(good, bad)))
    assert check.text == "not as published: /m/b, SHA-256 bbbbbbbbbbbb... instead of aaaaaaaaaaaa..."
    assert check_checksums(ModelFacts(checksums=(good,))).text == "SHA-256 as published: a"


def test_samples_are_more_than_ascii():
    assert any(not sample.isascii() for sample in SAMPLES)


def test_what_an_embedder_does(model):
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (model / "modules.json").write_text(json.dumps(listed))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 17}')

    checks = {check.code: check for check in examine(model)}

    assert not_well(checks.values()) == []
    for text in ("embed: last pooling, vectors of ", "texts of at most 17 tokens", "it has modules.json"):
        assert text in checks["task"].text
    assert checks["template"].verdict is checks["turns"].verdict is SKIP


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({}, "runs natively"),
        (
            {"model_impl": "transformers"},
            r"runs through transformers' code, about \d(\.\d)? times slower",
        ),
    ],
)
def test_the_line_of_the_model_says_which_code_computes_it(model, settings, way):
    checks = examine(model, **settings)
    assert not_well(checks) == []
    assert re.search(way + "$", checks[0].text), checks[0].text


def test_the_line_of_a_model_that_cannot_run_says_why(model):
    edit(model / "config.json", model_type="bloom", architectures=["BloomForCausalLM"])
    check = not_well(examine(model))[0]
    assert (check.code, check.verdict) == ("model", FAIL)
    assert "does not support external attention" in check.text


def test_stages_are_listed_with_their_weights(model):
    (check,) = [c for c in examine(model, pp=2, max_total_tokens=4096) if c.code == "fit"]

    assert len(check.details["stage_weights_bytes"]) == 2
    assert sum(check.details["stage_weights_bytes"]) == check.details["weights_bytes"]
    assert re.search(r" \+ .* in stages of 1 \+ 1 layers that wait \d+% of the time", check.text), check.text


@pytest.mark.parametrize(("has_pillow", "most_tiles"), [(True, 17), (False, 17), (True, 1)])
def test_a_model_that_sees_images_needs_pillow(monkeypatch, has_pillow, most_tiles):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if has_pillow or name != "PIL" else None
    )
    spec: Any = SimpleNamespace(
        pooling=None, vision=SimpleNamespace(row_pixels=0, rows_per_tile=64, most_tiles=most_tiles)
    )
    facts: Any = SimpleNamespace(spec=spec, source=None)

    check = check_task(facts)

    assert check.verdict is (OK if has_pillow else WARN)
    size = "a tile, 1 to 17 tiles" if most_tiles > 1 else "an image"
    assert f"of images too: 64 tokens {size}" in check.text
    assert has_pillow or ("the extra vision, is missing" in check.text and "pip install pillow" in check.fix)


def test_a_drafter_is_checked_and_its_cost_is_estimated(model, tmp_path):
    """The same model as its own draft model belongs to it, and costs as much."""
    (check,) = [
        c for c in examine(model, speculative="draft", speculative_model=model) if c.code == "drafter"
    ]
    assert check.verdict == WARN
    assert "a draft model of the same vocabulary" in check.text
    assert "a draft costs about 100% of a step, which does not pay" in check.text
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[10], list(vocab)[20]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    checks = examine(model, speculative="auto", speculative_model=other)
    (check,) = [c for c in checks if c.code == "drafter"]
    assert check.verdict == FAIL
    assert "use a draft model with the same vocabulary" in f"{check.text} {check.fix}"
    assert [c.code for c in not_well(checks)] == ["drafter"]
