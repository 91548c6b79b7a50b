"""Speed of images: a tower's share of the machine's products, first tokens, caches, and the pace of other requests.

    python benchmarks/vision/speed.py [--rounds 3] [--skip server|tower] [--folder FOLDER]

A model of the shape of SmolVLM-256M with random weights (tower: 12 layers x 768, tiles of 512 px, 64 rows each) on the
language model of the default model, which is written to a folder first. All figures of a run are ratios within it:

- tower: CPU seconds of a tile on one thread, which other load changes little, in bf16 and in 8 bits (`--quantization
  int8`); as share of the rate of the better one of oneDNN's and our products in bf16, of 1,024 tokens with its weights
- second question: its first token's time to that of the first question about an image of 512 px, 20 tokens of text
- encodes: tiles that are encoded for 8 chats about 2 images
- pace: P99 of the intervals between tokens of 4 streams while an image of 8 tiles and its small copy is answered, to
  that without; the time of that image is printed, too
- text: output tokens per second of 8 requests of text to this model, to those to the folder of its language model alone

For figures of servers the machine must be idle otherwise. Texts are asked of the two servers in turn, twice as many
rounds as of questions, and each server is first in half of them.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.server import MODEL_NAME, engine_side, running
from benchmarks.vision.train_shapes import Model
from engine.model_runner.kernels.native import native_ops
from engine.model_runner.kernels.plain import pack_linear_onednn
from engine.model_runner.model_context import ModelContext
from engine.model_runner.op_selection import Target, select_ops
from engine.model_runner.vision.tower import Tower
from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.format_selection import make_linear_format
from engine.model_runner.weights.reader import WeightReader
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hub.built_in.fetch import ensure_model
from engine.models.spec.model_spec import with_quantization
from engine.runtime.installation import cache_dir

TOWER: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
PATCHES: Final = 1024
PORT: Final = 30790
TARGETS: Final = {
    "second question, its first token to that of the first": "<= 0.125",
    "tiles encoded for 8 chats about 2 images": "2",
    "P99 between tokens of 4 streams, beside an image of 8 tiles to without": "<= 2",
    "texts, tokens/s to the text folder alone": ">= 0.98",
}


def write_model(folder: Path) -> Path:
    """The model, and beside it the folder of its language model alone; returns the first one."""
    seeing, text = folder / "seeing", folder / "text"
    if not (text / "config.json").exists():
        model = Model(ensure_model(), TOWER, scale_factor=4)
        model.save(seeing)
        processor = json.loads((seeing / "preprocessor_config.json").read_text())
        (seeing / "preprocessor_config.json").write_text(
            json.dumps(processor | {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}})
        )
        kinds = {"processor_class": "SmolVLMProcessor", "image_seq_len": 64}
        (seeing / "processor_config.json").write_text(json.dumps(kinds))
        model.save_text(text)
    return seeing


# ------------------------------------------------------------ the tower alone


def tower_seconds(folder: Path, quantization: Any) -> tuple[float, float]:
    """Seconds of a tile, and its floating-point operations."""
    spec, device, dtype = (
        with_quantization(read_hf_spec(folder), quantization),
        torch.device("cpu"),
        torch.bfloat16,
    )
    assert spec.vision is not None
    ops = select_ops(Target(spec, device, dtype))
    context = ModelContext(
        spec=spec,
        weights=WeightReader(DummyStore(0), dtype, device),
        linear_format=make_linear_format(quantization, spec, ops, device, dtype),
        ops=ops,
        max_model_len=1024,
        device=device,
    )
    tower = Tower(context, spec.vision)
    tile = torch.randint(0, 256, (512, 512, 3), dtype=torch.uint8)
    with torch.inference_mode():
        return best_cpu_s(lambda: list(tower.parts_of(tile))), spec.vision.flops_per_tile(spec.hidden_size)


def best_cpu_s(work: Callable[[], object], rounds: int = 5) -> float:
    """The least CPU seconds of this thread for the work."""
    work()
    seconds = []
    for _ in range(rounds):
        began_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - began_s)
    return min(seconds)


def product_seconds(inputs: int, outputs: int) -> float:
    """CPU seconds of a product of all patches of a tile, by oneDNN or by our kernels."""
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(PATCHES, inputs).bfloat16()
    packs = (pack_linear_onednn, native_ops().pack_linear)
    with torch.inference_mode():
        return min(best_cpu_s(partial(pack(weight), x, None)) for pack in packs)


def measure_tower(folder: Path) -> Iterator[tuple[str, str]]:
    """The rows of the table that need no server."""
    torch.set_num_threads(1)
    size, inner = TOWER["hidden_size"], TOWER["intermediate_size"]
    shapes = ((size, 3 * size), (size, size), (size, inner), (inner, size))
    limit_s = sum(itertools.starmap(product_seconds, shapes))
    rate = sum(2 * PATCHES * inputs * outputs for inputs, outputs in shapes) / limit_s
    plain_s, flops = tower_seconds(folder, None)
    int8_s, _ = tower_seconds(folder, "int8")
    yield "tile in bf16, CPU s of one thread", f"{plain_s:.3f}"
    yield "rate of products in bf16, GFLOP/s of one thread", f"{rate / 1e9:.0f}"
    yield "tile in bf16, share of that rate", f"{flops / plain_s / rate:.2f}"
    yield "tile in bf16 to 8 bits, times as fast", f"{plain_s / int8_s:.2f}"


# ------------------------------------------------------------ a server


def image_url(seed: int, width: int = 512, height: int = 512) -> str:
    """A picture of noise as a data: URL."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(url: str, content: object, num_tokens: int, times: list[float] | None = None) -> float:
    """Ask for exactly so many tokens; returns the seconds to the first one. `times`: gets the time of each chunk."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    began_s, first_s = time.perf_counter(), 0.0
    with urllib.request.urlopen(request, timeout=900) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            first_s = first_s or now_s - began_s
            if times is not None:
                times.append(now_s)
    return first_s


def about(image: str, text: str, detail: str = "low") -> list[dict[str, Any]]:
    """A question about an image."""
    return [
        {"type": "image_url", "image_url": {"url": image, "detail": detail}},
        {"type": "text", "text": text},
    ]


def encoded_tiles(url: str) -> int:
    """Tiles that the server has encoded."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    (found,) = [line for line in lines if "encoder_tiles_total" in line and not line.startswith("#")]
    return int(float(found.rsplit(" ", 1)[1]))


def second_question(url: str, rounds: int) -> float:
    """Median of the ratios; each round has an image of its own."""
    ratios = []
    for number in range(rounds):
        image = image_url(100 + number)
        first_s = ask(url, about(image, "What is the color of the thing at the top left here?"), 2)
        ratios.append(
            ask(url, about(image, "And which of them is the one that is larger here?"), 2) / first_s
        )
    return statistics.median(ratios)


def pace(url: str) -> tuple[float, float, float]:
    """P99 in seconds without and beside an image of 8 tiles, and the seconds to its first token."""
    ask(url, about(image_url(1), "Warm up."), 8)
    streams: list[list[float]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=ask, args=(url, f"Tell me about number {number}.", 1500, times))
        for number, times in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    while min(map(len, streams)) < 300:
        time.sleep(0.05)
    began_s = time.perf_counter()
    first_s = ask(url, about(image_url(2, 2048, 1024), "What is on it?", "high"), 1)
    ended_s = time.perf_counter()
    for thread in threads:
        thread.join()

    def p99(first: float, last: float) -> float:
        gaps = [
            after - before
            for times in streams
            for before, after in itertools.pairwise(times)
            if first <= before and after <= last
        ]
        return float(np.percentile(gaps, 99))

    return p99(began_s - 3.0, began_s), p99(began_s, ended_s), first_s


def text_rate(url: str) -> float:
    """Tokens per second of 8 texts at once."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(url, f"Write about {number}.", 128), range(8)))
    return 8 * 128 / (time.perf_counter() - began_s)


def measure_servers(folder: Path, rounds: int) -> Iterator[tuple[str, str]]:
    """The rows of the table that need servers."""
    second, tiles, paced, texts = TARGETS
    options = ("--max-model-len", "4096", "--max-total-tokens", "32768", "--mm-max-pixels", "4000000")
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    with running(
        engine_side("seeing", PORT, str(folder / "seeing"), *options), logs / "seeing.log"
    ) as server:
        url = server.side.url
        yield second, f"{second_question(url, rounds):.3f}"
        before = encoded_tiles(url)
        images = [image_url(20), image_url(21)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: ask(url, about(images[n % 2], f"Question {n}?"), 16), range(8)))
        yield tiles, str(encoded_tiles(url) - before)
        without_s, beside_s, image_s = pace(url)
        yield paced, f"{beside_s / without_s:.2f} ({beside_s * 1e3:.0f} ms to {without_s * 1e3:.0f} ms)"
        yield "the image's first token beside the streams, s", f"{image_s:.1f}"
        text = engine_side("text", PORT + 1, str(folder / "text"), *options[:4])
        with running(text, logs / "text.log") as other:
            text_rate(url), text_rate(other.side.url)
            ratios = []
            for number in range(2 * rounds):
                order = [url, other.side.url][:: -1 if number % 2 else 1]
                rates = {each: text_rate(each) for each in order}
                ratios.append(rates[url] / rates[other.side.url])
    yield texts, f"{statistics.median(ratios):.2f}"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", choices=("server", "tower"), help="leave out this part of the table")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "benchmarks" / "vision" / "speed")
    options = parser.parse_args()
    write_model(options.folder)
    print(f"{'figure':<74}{'measured':>22}{'target':>12}")
    parts = [] if options.skip == "tower" else [measure_tower(options.folder / "seeing")]
    parts += [] if options.skip == "server" else [measure_servers(options.folder, options.rounds)]
    for part in parts:
        for name, value in part:
            print(f"{name:<74}{value:>22}{TARGETS.get(name, ''):>12}", flush=True)


if __name__ == "__main__":
    main()
