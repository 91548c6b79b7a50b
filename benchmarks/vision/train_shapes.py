"""A small model that sees: a tower trained through the frozen default model, on pictures of shapes.

    python benchmarks/vision/train_shapes.py [--aligned 160000] [--trained 2000] [--folder FOLDER]

There are no weights of a tower in any package that can be installed offline, so the engine's images are proved on one
that is trained here. A picture has one to four equal shapes of one color in one half. The tower is SigLIP's (4 layers,
192 wide), with the connector of Idefics3. First the rows learn to be near the embeddings of the words that describe the
picture, without the language model (`align`); then the answers of the default model are trained through its frozen
layers, in bfloat16 (`train`). The folder has the form of SmolVLM: transformers and the engine read it. Printed is the
share of right answers about pictures that were not trained on; `--compare` prints it for the engine and transformers,
each with its own code, and how many of their answers are equal.

`--aligned 6000 --trained 480` takes three minutes of CPU time (2026-11-29, an AMD EPYC under load: 0.69 of the answers
about 25 pictures were right; 0.31 are by chance). `--aligned 160000 --trained 12000` (2026-11-30, Zen 5, one thread,
half an hour of CPU time) was ended after 1,664 trained pictures, when the loss was 0.002; `--compare --pictures 100`
of that model: 1.000 of the 400 answers right in the engine and in transformers, all 400 equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

# As a script, import the engine from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from engine.model_runner.weights.gguf import GGUFStore
from engine.models.hub.built_in.fetch import ensure_model
from engine.models.load_spec import load_spec
from engine.models.source import resolve_source
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.installation import cache_dir

SIDE: Final = 64
PATCH: Final = 8
FACTOR: Final = 2
SMALL_TOWER: Final = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "image_size": SIDE,
    "patch_size": PATCH,
}
ROWS: Final = (SIDE // PATCH // FACTOR) ** 2
COLORS: Final = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
}
SHAPES: Final = ("circle", "square", "triangle", "cross")
COUNTS: Final = ("one", "two", "three", "four")
SIDES: Final = ("left", "right")
QUESTIONS: Final = {
    "Which color?": tuple(COLORS),
    "Which shape?": SHAPES,
    "How many?": COUNTS,
    "Which side?": SIDES,
}
"""Question -> its answers."""
SPECIAL: Final = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
TILES: Final = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELD_OUT: Final = 1 << 40
"""Seeds of pictures from here on are not trained on."""
_ALIGN_BATCH, _TRAIN_BATCH = 32, 8


class Picture(NamedTuple):
    """Pixels, [SIDE, SIDE, 3] uint8, and the answers in the order of `QUESTIONS`."""

    pixels: npt.NDArray[np.uint8]
    answers: tuple[str, ...]


def draw(seed: int) -> Picture:
    """Draw a picture; equal seeds give equal pictures."""
    from PIL import Image, ImageDraw

    source = random.Random(seed)
    color, shape, side = source.choice(list(COLORS)), source.choice(SHAPES), source.choice(SIDES)
    count = source.randint(1, 4)
    light = source.randint(225, 255)
    image = Image.new("RGB", (SIDE, SIDE), (light, light, light))
    pen = ImageDraw.Draw(image)
    fill = tuple(min(255, max(0, value + source.randint(-20, 20))) for value in COLORS[color])
    cells = source.sample(list(itertools.product(range(2), range(3))), count)
    for column, row in cells:
        radius = source.randint(5, 7)
        x = (side == "right") * SIDE // 2 + 8 + 16 * column + source.randint(-1, 1)
        y = 11 + 21 * row + source.randint(-3, 3)
        _draw_shape(pen, shape, x, y, radius, fill)
    return Picture(np.asarray(image), (color, shape, COUNTS[count - 1], side))


def _draw_shape(pen: Any, shape: str, x: int, y: int, radius: int, fill: tuple[int, ...]) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    match shape:
        case "circle":
            pen.ellipse(box, fill=fill)
        case "square":
            pen.rectangle(box, fill=fill)
        case "triangle":
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
        case _:
            pen.line((*box[:2], *box[2:]), fill=fill, width=4)
            pen.line((box[0], box[3], box[2], box[1]), fill=fill, width=4)


def pixels_of(pictures: Sequence[Picture]) -> Tensor:
    """[n, 3, SIDE, SIDE] float32 in -1..1."""
    stacked = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1.0


# ------------------------------------------------------------ the model


class Model:
    """The default model in a SmolVLM of transformers, with a tower that begins random.

    Attributes:
        vlm: the model; only its tower and connector are trained.
        special: ids of the added tokens.
    """

    def __init__(
        self, gguf: Path, tower: Mapping[str, int] = SMALL_TOWER, scale_factor: int = FACTOR
    ) -> None:
        """`tower`: its sizes, as in transformers' configuration."""
        import transformers

        source = resolve_source(str(gguf))
        spec, self.tokenizer = load_spec(source), load_tokenizer(source)
        self.special = {token: spec.vocab_size + number for number, token in enumerate((*SPECIAL, *TILES))}
        text = {
            "model_type": "llama",
            "vocab_size": -(-(spec.vocab_size + len(self.special)) // 64) * 64,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_theta": spec.rope_theta,
            "max_position_embeddings": spec.max_position_embeddings,
            "tie_word_embeddings": True,
            "bos_token_id": spec.bos_token_id,
            "eos_token_id": spec.eos_token_ids[0],
            "pad_token_id": spec.eos_token_ids[0],
        }
        config = transformers.AutoConfig.for_model(
            "smolvlm",
            text_config=text,
            vision_config=dict(tower),
            image_token_id=self.special["<image>"],
            scale_factor=scale_factor,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        self.vlm: Any = transformers.SmolVLMForConditionalGeneration(config).eval()
        self._language = self.vlm.model.text_model
        self._take_weights(GGUFStore(gguf, spec))
        self.vlm.requires_grad_(False)
        self._language.to(torch.bfloat16)
        self.end = self.ids("<|im_end|>")

    @torch.no_grad()
    def _take_weights(self, store: GGUFStore) -> None:
        for name, parameter in self._language.named_parameters():
            shape = store.shape(f"model.{name}", ())
            assert shape is not None, name
            weight = torch.empty(shape)
            store.read(f"model.{name}", weight)
            parameter[: shape[0]] = weight
            parameter[shape[0] :] = 0.0  # of tokens that the default model does not have

    @property
    def seeing(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        parts = (self.vlm.model.vision_model, self.vlm.model.connector)
        return [parameter for part in parts for parameter in part.parameters()]

    @property
    def table(self) -> Tensor:
        """The embeddings, [vocab, hidden]."""
        table: Tensor = self._language.embed_tokens.weight
        return table

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, in which special tokens are tokens."""
        return list(self.tokenizer.encode(text))

    def rows(self, pixels: Tensor) -> Tensor:
        """[n, ROWS, hidden] of pictures."""
        states = self.vlm.model.vision_model(pixel_values=pixels).last_hidden_state
        rows: Tensor = self.vlm.model.connector(states)
        return rows

    def conversation(self, picture: Picture, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens, and labels: the tokens of answers and of their ends, -1 elsewhere.

        `order`: the questions, the first of which comes after the picture.
        """
        around, image, whole, _ = (self.special[token] for token in SPECIAL)
        ids, labels = [], []
        questions = list(QUESTIONS)
        for place, number in enumerate(order):
            shown = [] if place else [around, whole, *[image] * ROWS, around]
            asked = [*self.ids("<|im_start|>user\n"), *shown]
            asked += [*self.ids(questions[number]), *self.end, *self.ids("\n<|im_start|>assistant\n")]
            answer = [*self.ids(picture.answers[number]), *self.end]
            newline = self.ids("\n")
            ids += [*asked, *answer, *newline]
            labels += [-1] * len(asked) + answer + [-1] * len(newline)
        return ids, labels

    def logits(self, pictures: Sequence[Picture], orders: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Logits where an answer's token follows, [n, vocab], and these tokens, [n]."""
        pairs = [self.conversation(*pair) for pair in zip(pictures, orders, strict=True)]
        length = max(len(ids) for ids, _ in pairs)
        ids = torch.tensor([each + self.end * (length - len(each)) for each, _ in pairs])
        labels = torch.tensor([each + [-1] * (length - len(each)) for _, each in pairs])
        rows = self.rows(pixels_of(pictures)).to(torch.bfloat16)
        inputs = self.table[ids].masked_scatter((ids == self.special["<image>"])[..., None], rows)
        hidden = self._language(inputs_embeds=inputs, use_cache=False).last_hidden_state
        wanted = labels[:, 1:] >= 0
        return F.linear(hidden[:, :-1][wanted], self.table).float(), labels[:, 1:][wanted]

    def save_text(self, folder: Path) -> None:
        """Write the folder of the language model alone, with its tokenizer, in bfloat16."""
        import transformers

        config = self._language.config
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.model.load_state_dict(self._language.state_dict())
        model.tie_weights()
        model.save_pretrained(folder)
        self._save_tokenizer(folder)

    def save(self, folder: Path) -> None:
        """Write the folder, with tokenizer and processor, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        self.vlm.to(torch.bfloat16).save_pretrained(folder)
        self._save_tokenizer(folder)
        processor = {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": SIDE},
            "max_image_size": {"longest_edge": SIDE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "resample": 1,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
        kinds = {"processor_class": "SmolVLMProcessor", "image_seq_len": ROWS}
        (folder / "processor_config.json").write_text(json.dumps(kinds, indent=1))

    def _save_tokenizer(self, folder: Path) -> None:
        tokens = json.loads(self.tokenizer.to_json())
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokens["added_tokens"] += [{"id": i, "content": text, **flags} for text, i in self.special.items()]
        (folder / "tokenizer.json").write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")
        named = {**self.tokenizer.special_tokens, "chat_template": TEMPLATE}
        named |= {"tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "SmolVLMProcessor"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1))


# ------------------------------------------------------------ training


def _optimizer(model: Model, rate: float) -> torch.optim.AdamW:
    for parameter in model.seeing:
        parameter.requires_grad_(True)
    return torch.optim.AdamW(model.seeing, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)


def _step(model: Model, optimizer: torch.optim.AdamW, loss: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.seeing, 1.0)
    optimizer.step()


def align(model: Model, num_pictures: int, seeds: Iterator[int], rate: float = 1e-3) -> None:
    """Train a quarter of the rows to be the embedding of each answer's first token."""
    began_s, num_steps = time.monotonic(), num_pictures // _ALIGN_BATCH
    targets = [
        torch.stack([model.table[model.ids(word)[0]].float() for word in words])
        for words in QUESTIONS.values()
    ]
    scale = torch.cat(targets).pow(2).mean()
    optimizer, mean = _optimizer(model, rate), 0.0
    for step in range(num_steps):
        pictures = [draw(next(seeds)) for _ in range(_ALIGN_BATCH)]
        parts = model.rows(pixels_of(pictures)).chunk(len(QUESTIONS), 1)
        loss = torch.zeros(())
        for number, (part, words) in enumerate(zip(parts, QUESTIONS.values(), strict=True)):
            wanted = torch.tensor([words.index(picture.answers[number]) for picture in pictures])
            scores = part @ targets[number].T / scale / part.shape[-1] * 8.0
            flat = scores.flatten(0, 1), wanted.repeat_interleave(part.shape[1])
            near = (part - targets[number][wanted][:, None]).pow(2).mean() / scale
            loss = loss + F.cross_entropy(*flat) + 0.5 * near
        mean += (float(loss.detach()) - mean) / min(step + 1, 20)
        _step(model, optimizer, loss, rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / num_steps))
        if step % 20 == 19:
            print(f"aligned on {(step + 1) * _ALIGN_BATCH:,} pictures, loss {mean:.3f}", flush=True)
    print(f"aligned in {time.monotonic() - began_s:.0f} s", flush=True)


def train(model: Model, num_pictures: int, seeds: Iterator[int], rate: float = 4e-4) -> None:
    """Train the answers to all questions, in random order, through the language model."""
    began_s, num_steps = time.monotonic(), num_pictures // _TRAIN_BATCH
    source, optimizer, mean = random.Random(0), _optimizer(model, rate), 0.0
    for step in range(num_steps):
        pictures = [draw(next(seeds)) for _ in range(_TRAIN_BATCH)]
        orders = [source.sample(range(len(QUESTIONS)), len(QUESTIONS)) for _ in pictures]
        loss = F.cross_entropy(*model.logits(pictures, orders))
        mean += (float(loss.detach()) - mean) / min(step + 1, 10)
        _step(model, optimizer, loss, rate * min(1.0, (step + 1) / 10) * (1.0 - 0.95 * step / num_steps))
        if step % 10 == 9:
            print(f"trained on {(step + 1) * _TRAIN_BATCH:,} pictures, loss {mean:.3f}", flush=True)
    print(f"trained in {time.monotonic() - began_s:.0f} s", flush=True)


@torch.no_grad()
def evaluate(model: Model, num_pictures: int) -> dict[str, float]:
    """Share of right answers to each question about pictures that were not trained on, each asked alone.

    An answer is right if greedy decoding gives it, to its end.
    """
    right = dict.fromkeys(QUESTIONS, 0)
    for number in range(num_pictures):
        picture = draw(HELD_OUT + number)
        for index, question in enumerate(QUESTIONS):
            logits, wanted = model.logits([picture], [[index]])
            right[question] += bool((logits.argmax(-1) == wanted).all())
    return {question: count / num_pictures for question, count in right.items()}


def make_model(folder: Path, num_aligned: int, num_trained: int, num_pictures: int) -> dict[str, float]:
    """Train on so many pictures, save the folder, and evaluate on others."""
    model, seeds = Model(ensure_model()), iter(range(HELD_OUT))
    align(model, num_aligned, seeds)
    train(model, num_trained, seeds)
    shares = evaluate(model, num_pictures)
    model.save(folder)
    return shares


def compare(folder: Path, num_pictures: int, **options: Any) -> tuple[float, float]:
    """Print the shares of right answers of the engine and of transformers in float32, and how many are equal.

    Args:
        options: of `LLM`.

    Returns:
        The engine's share of right answers, and the share of equal ones.
    """
    import transformers
    from PIL import Image

    from engine import LLM, SamplingParams

    reference = transformers.SmolVLMForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    end, length = reference.config.text_config.eos_token_id, 4
    greedy = SamplingParams(temperature=0.0, max_new_tokens=length)
    right = {question: [0, 0] for question in QUESTIONS}
    num_equal = 0
    with LLM(str(folder), dtype="float32", mm_detail="high", **options) as llm:
        for number in range(num_pictures):
            picture = draw(HELD_OUT + number)
            image = {"type": "image", "image": Image.fromarray(picture.pixels)}
            chats = [[image, {"type": "text", "text": question}] for question in QUESTIONS]
            outputs = llm.chat([[{"role": "user", "content": content}] for content in chats], greedy)
            for output, question, answer in zip(outputs, QUESTIONS, picture.answers, strict=True):
                prompt = torch.tensor([output.prompt_token_ids])
                ids = reference.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    pixel_values=pixels_of([picture])[None],
                    max_new_tokens=length,
                    do_sample=False,
                )[0, prompt.shape[1] :].tolist()
                own, theirs = ([each for each in found if each != end] for found in (output.token_ids, ids))
                num_equal += own == theirs
                right[question][0] += output.text == answer
                right[question][1] += llm.tokenizer.decode(theirs) == answer
    for question, counts in right.items():
        print(
            f"{question} engine {counts[0] / num_pictures:.2f}, transformers {counts[1] / num_pictures:.2f}"
        )
    total = num_pictures * len(QUESTIONS)
    engine, other = (sum(counts[side] for counts in right.values()) / total for side in (0, 1))
    print(
        f"right answers: engine {engine:.3f}, transformers {other:.3f}; equal answers: {num_equal} of {total}"
    )
    return engine, num_equal / total


def main() -> None:
    """Train, save, and print the shares of right answers; or compare those of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aligned", type=int, default=160_000, help="pictures to align rows on")
    parser.add_argument("--trained", type=int, default=2_000, help="pictures to train through the model on")
    parser.add_argument("--pictures", type=int, default=100, help="to evaluate on")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=cache_dir() / "benchmarks" / "vision" / "shapes")
    parser.add_argument(
        "--compare", action="store_true", help="the engine and transformers on a trained --folder"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.compare:
        compare(options.folder, options.pictures)
        return
    shares = make_model(options.folder, options.aligned, options.trained, options.pictures)
    for question, share in shares.items():
        print(f"{question} {share:.2f}")
    print(f"right answers: {sum(shares.values()) / len(shares):.3f}; the model is in {options.folder}")


if __name__ == "__main__":
    main()
