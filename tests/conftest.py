"""What all tests share: no GPU test without a GPU, and no wall-clock limit on Hypothesis' single examples."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.browser import CHROMIUM, MISSING, Browser
from tests.certificates import read_certificates_once
from tests.e2e.serving import EngineServe
from tests.selection import pytest_addoption, pytest_configure, pytest_ignore_collect, select

__all__ = ["pytest_addoption", "pytest_configure", "pytest_ignore_collect"]

# The machine may be busy with other things; `timeout` in pyproject.toml ends what really hangs. Every run has the same
# examples, so that a red run is somebody's change; to look for new ones: make test ARGS=--hypothesis-profile=explore
# Hypothesis' own check that ten examples are drawn within 30 s is a limit on the wall clock, too.
PATIENT = hypothesis.settings(
    deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("engine", PATIENT, derandomize=True)
hypothesis.settings.register_profile("explore", PATIENT)
hypothesis.settings.load_profile("engine")

# What the caller's shell says is no part of a test: engines' keys and clusters, the terminal's looks, how machines are
# connected. A proxy is for what lies outside: the tests' servers are on the loopback interface.
KEPT_VARIABLES = {"ENGINE_CACHE_DIR", "ENGINE_FUZZ_EXAMPLES", "ENGINE_TEST_ROUTERS", "ENGINE_TEST_SANITIZE"}
for name in (
    *(name for name in os.environ if name.startswith("ENGINE_") and name not in KEPT_VARIABLES),
    *("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "XDG_STATE_HOME"),
):
    os.environ.pop(name, None)
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost", "::1")))

# Some images forbid bytecode. Then each of the engine's processes that tests start, and each worker, would compile all
# sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

read_certificates_once()

# Passes of the garbage collector over what tests make, syntax trees and items foremost, took a fifth of all time. Tests
# that look for cycles collect them themselves.
gc.set_threshold(200_000, 20, 20)

# `nohup make test` has SIGHUP ignored, `make test &` in a script SIGINT, by the tests' engines too, which mean them.
for signum, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, usual)

# Triton asks when a kernel is defined. Without a driver kernels run in its interpreter, on CPU tensors; with one they
# run on the GPU, so the same tests check both.
HAS_NVIDIA_DRIVER = Path("/dev/nvidiactl").exists()
if not HAS_NVIDIA_DRIVER:
    os.environ["TRITON_INTERPRET"] = "1"

# On other systems than Linux there is no Triton, and nothing to test with it.
collect_ignore_glob: list[str] = []
if importlib.util.find_spec("triton") is None:
    names = ("compile_report", "sampler_backend", "quantized", "decode_graphs")
    collect_ignore_glob = ["*triton*", *(f"*/test_{name}.py" for name in names)]

# Several workers (`make test` starts one per core) leave one core to each: before torch asks how many there are.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# First: xdist's worker, which reads the groups, is registered after this file and would be asked before it.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases to slow runs, share the tests out among workers, and skip GPU tests where there is no GPU.

    A file stays together, for the fixtures that its tests share, and tests with real processes too: those measure time,
    and two engines at once on two cores would be slow for no fault of theirs. They are the longest group, so they begin
    first, while the other workers go through the files.
    """
    select(config, items)
    for item in items:
        together = "processes" if item.get_closest_marker("real_process") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(together))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("real_process") is None)
    _skip_gpu_tests(items)


def pytest_collection_finish() -> None:
    """Take what is there by now, the items foremost, out of the collector's passes, which would take a second each."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """The same random numbers in every run, whatever ran before: a red run is somebody's change."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test sets up for its process' logs ends with it: the reports of later tests hold what those log."""
    root, ours = logging.getLogger(), logging.getLogger("engine")
    root_level, our_level, handlers = root.level, ours.level, list(root.handlers)
    yield
    root.setLevel(root_level)
    ours.setLevel(our_level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)


def _skip_gpu_tests(items: list[pytest.Item]) -> None:
    """Torch is asked only when one is about to run."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for the tests of pages; without one they are skipped."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        began_with = browser.num_pages()
        yield browser
        assert browser.num_pages() == began_with, "tests left pages open, which go on until the last test"


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the end-to-end tests, a folder in Hugging Face layout; see `e2e/model.py`."""
    from tests.e2e.model import make_model

    return make_model(tmp_path_factory.mktemp("models") / "small-llama")


@pytest.fixture(scope="session")
def shared_serve(small_llama: Path) -> Iterator[EngineServe]:
    """A server of it that all tests share: whoever uses it leaves it idle."""
    with EngineServe(str(small_llama), "--dtype", "float32") as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout: a random Llama of 60k weights over bytes, with a tokenizer and a chat template.

    Its greedy text is noise, and the same in every run.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(
            {char: 3 + i for i, char in enumerate(alphabet)} | {s: i for i, s in enumerate(specials)}, []
        )
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in specials])
    core.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    hidden, inter, layers, heads, kv_heads, vocab = 32, 64, 2, 4, 2, 272
    head_dim = hidden // heads
    spec = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(spec))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{layer}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{layer}mlp.gate_proj.weight": (inter, hidden),
            f"{layer}mlp.up_proj.weight": (inter, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inter),
        }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
