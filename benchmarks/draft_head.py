"""Share of the default model's next tokens that a small head names, which is trained on the model's answers.

    python benchmarks/draft_head.py answers [--tokens 50000]      # minutes: the model answers templates of questions
    python benchmarks/draft_head.py train [--tokens 50000 12000]  # train a head on so many tokens, and evaluate it

The head has the form of EAGLE-3 (Li et al., 2025): a linear map of the residuals after three layers, one decoder layer
with attention over this map and the next token's embedding, and logits of the likeliest ids. Training unrolls three
drafts: the second and third read the head's own output in place of the model's features, as when it serves. Labels are
the model's probabilities over these ids. No template is trained on and evaluated. A draft
counts as right if it is the token that greedy decoding gave; the second only where the first was right, and so on. The
n-gram beside it proposes what followed the longest earlier occurrence of the last tokens, three at most.

It decides whether a drafter is worth building for this model: below 0.38 of first drafts after 50,000 tokens it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from engine import LLM, SamplingParams
from engine.model_runner.weights.gguf import GGUFStore
from engine.models.hub.built_in.fetch import ensure_model
from engine.models.load_spec import load_spec
from engine.models.source import resolve_source
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.installation import cache_dir

NUM_DRAFTS: Final = 3
STOP: Final = 0.38
"""Share of right first drafts below which a drafter is not built."""
MAX_ANSWER: Final = 160
MAX_LEN: Final = 320
SUBSET: Final = 8192
"""Ids that the head can name: the likeliest of the answers trained on."""
DEPTH_WEIGHT: Final = 0.8
"""Ratio of a draft's loss to that of the draft before it."""
BATCH: Final = 2
HELD_OUT: Final = 6

TEMPLATES: Final = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "Why is {} important?",
    "Tell me a story about {}.",
    "What are the advantages and disadvantages of {}?",
    "How has {} changed over the last century?",
    "Write an email to a colleague about {}.",
    "Give me three questions about {} with their answers.",
    "Describe {} in two sentences.",
    "What would the world be without {}?",
    "Compare {} with something similar.",
    "What do beginners get wrong about {}?",
    "Write a dialog between two friends about {}.",
    "How would you teach {} in a school?",
    "Write a Python function that has to do with {}.",
    "Plan a weekend around {}.",
    "Which books should I read about {}?",
    "Summarize the history of {}.",
    "What is the future of {}?",
    "Write a product description that mentions {}.",
    "Make a table of terms around {}.",
    "Is {} good for your health?",
    "Write instructions, step by step, for someone who is new to {}.",
    "What is a common myth about {}?",
    "Write a letter to the editor about {}.",
    "How does {} affect the environment?",
    "Which jobs have to do with {}?",
    "Translate a sentence about {} into French.",
)
_TOPICS: Final = """\
gravity; bread; the moon; chess; rivers; democracy; bicycles; photosynthesis; jazz; computers;
volcanoes; tea; bridges; dreams; money; bees; the Roman empire; vaccines; soccer; winter; libraries;
electricity; friendship; coffee; trains; whales; statistics; painting; earthquakes; gardens;
the internet; sleep; mountains; cooking; clocks; sailing; languages; maps; dogs; solar energy;
poetry; the ocean; music theory; robots; taxes; glass; cheese; weather; space travel; memory"""
TOPICS: Final = tuple(topic.strip() for topic in _TOPICS.split(";"))


class Answer(NamedTuple):
    """Prompt and answer; `template`: its index."""

    template: int
    prompt: list[int]
    answer: list[int]


def main() -> None:
    """Write answers, or train and evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("answers", "train"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000], help="of answers")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=6e-4, help="largest learning rate")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--file", type=Path, default=cache_dir() / "benchmarks" / "draft_head" / "answers.json"
    )
    options = parser.parse_args()
    if options.part == "answers":
        write_answers(options.file, max(options.tokens), options.threads)
        return
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    answers = [Answer(*each) for each in json.loads(options.file.read_text())]
    held_out = {len(TEMPLATES) * number // HELD_OUT for number in range(HELD_OUT)}
    trained = [each for each in answers if each.template not in held_out]
    evaluated = [each for each in answers if each.template in held_out]
    target = Target(ensure_model())
    print(
        f"evaluated on {sum(len(each.answer) for each in evaluated):,} tokens of {HELD_OUT} other templates"
    )
    print(f"n-gram: {ngram_share(evaluated):.3f}")
    for num_tokens in options.tokens:
        part = list(_first(trained, num_tokens))
        began_s = time.process_time()
        head = train(target, part, options.epochs, options.rate)
        shares = evaluate(target, head, evaluated)
        count = sum(len(each.answer) for each in part)
        print(
            f"{count:,} tokens, {options.epochs} epochs, {time.process_time() - began_s:.0f} s of CPU time: "
            + "right drafts "
            + ", ".join(f"{share:.3f}" for share in shares)
            + f" (first: {STOP} or more)",
            flush=True,
        )


def write_answers(path: Path, num_tokens: int, threads: int) -> None:
    """Answer questions in random order until there are so many tokens of templates that are trained on."""
    source = random.Random(0)
    asked = [(number, topic) for number in range(len(TEMPLATES)) for topic in TOPICS]
    source.shuffle(asked)
    answers: list[Answer] = []
    params = SamplingParams(temperature=0.0, max_new_tokens=MAX_ANSWER)
    with LLM(ensure_model(), num_threads=threads) as llm:
        while asked and sum(len(each.answer) for each in answers) < num_tokens * len(TEMPLATES) / (
            len(TEMPLATES) - HELD_OUT
        ):
            some, asked = asked[:48], asked[48:]
            texts = [TEMPLATES[number].format(topic) for number, topic in some]
            prompts = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
            outputs = llm.generate(prompts, params)
            answers += (
                Answer(number, prompt, output.token_ids)
                for (number, _), prompt, output in zip(some, prompts, outputs, strict=True)
                if len(output.token_ids) > NUM_DRAFTS + 1
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(answers))
    print(f"{sum(len(each.answer) for each in answers):,} tokens of {len(answers)} answers: {path}")


def _first(answers: Sequence[Answer], num_tokens: int) -> Iterator[Answer]:
    total = 0
    for each in answers:
        if total >= num_tokens:
            return
        total += len(each.answer)
        yield each


def ngram_share(answers: Sequence[Answer]) -> float:
    """Share of answers' tokens that followed the longest earlier occurrence of the last three tokens or fewer."""
    right = total = 0
    for each in answers:
        ids = each.prompt + each.answer
        last: dict[tuple[int, ...], int] = {}
        for end in range(1, len(ids)):
            guesses = (last.get(tuple(ids[end - n : end])) for n in (3, 2, 1) if end >= n)
            guess = next((guess for guess in guesses if guess is not None), None)
            if end >= len(each.prompt) + 1:
                total += 1
                right += guess == ids[end]
            for n in (1, 2, 3):
                if end >= n:
                    last[tuple(ids[end - n : end])] = ids[end]
    return right / total


# ------------------------------------------------------------ the model


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., T, heads, dim] by angles [T, dim]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def _angles(num: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(num).float(), theta ** (-torch.arange(0, dim, 2).float() / dim))
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


class Target:
    """The default model in float32, from its dequantized weights.

    Attributes:
        features: the layers before the residuals that the head reads.
    """

    def __init__(self, gguf: Path) -> None:
        self.spec: ModelSpec = load_spec(resolve_source(str(gguf)))
        store = GGUFStore(gguf, self.spec)
        self.weights: dict[str, Tensor] = {}
        for name in store.names():
            shape = store.shape(name, ())
            assert shape is not None, name
            self.weights[name] = torch.empty(shape)
            store.read(name, self.weights[name])
        self.embeddings = self.weights["model.embed_tokens.weight"]
        num_layers = self.spec.num_layers
        self.features = (num_layers // 10, num_layers // 2 + 1, num_layers - 3)
        self.angles = _angles(MAX_LEN + NUM_DRAFTS, self.spec.head_dim, self.spec.rope_theta)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.spec.rms_norm_eps)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, 3 * hidden] in bfloat16, and the last normalized states [T, hidden], of the ids [T]."""
        spec, w = self.spec, self.weights
        num, dim = len(ids), spec.head_dim
        cos, sin = (each[:num] for each in self.angles)
        x = self.embeddings[ids]
        kept = []
        for layer in range(spec.num_layers):
            name = f"model.layers.{layer}"
            h = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                F.linear(h, w[f"{name}.self_attn.{part}_proj.weight"]).view(num, -1, dim) for part in "qkv"
            )
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + F.linear(out[0].transpose(0, 1).flatten(1), w[f"{name}.self_attn.o_proj.weight"])
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (F.linear(h, w[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])
            if layer in self.features:
                kept.append(x)
        return torch.cat(kept, -1).bfloat16(), self.norm(x, "model.norm")


# ------------------------------------------------------------ the head


class Head(nn.Module):
    """One decoder layer over features and embeddings; begins as the model's last layer, on the last features."""

    def __init__(self, target: Target, subset: Tensor) -> None:
        super().__init__()
        spec, size = target.spec, target.spec.hidden_size
        last = f"model.layers.{spec.num_layers - 1}"
        self.spec, self.angles = spec, target.angles
        self.fc = nn.Parameter(torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), 1))

        def of(name: str) -> Tensor:
            return target.weights[f"{last}.{name}.weight"].clone()

        self.qkv = nn.ParameterList()
        for part in "qkv":
            weight = of(f"self_attn.{part}_proj")
            self.qkv.append(torch.cat((torch.zeros_like(weight), weight), 1))
        self.o = nn.Parameter(of("self_attn.o_proj"))
        self.gate, self.up = nn.Parameter(of("mlp.gate_proj")), nn.Parameter(of("mlp.up_proj"))
        self.down = nn.Parameter(of("mlp.down_proj"))
        self.norms = nn.ParameterList(
            [of("input_layernorm"), torch.ones(size), of("post_attention_layernorm")]
        )
        self.norms.append(target.weights["model.norm.weight"].clone())
        self.logits = nn.Parameter(target.embeddings[subset].clone())

    def _norm(self, x: Tensor, index: int) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[index], self.spec.rms_norm_eps)

    def forward(self, features: Tensor, embeddings: Tensor) -> list[Tensor]:
        """Logits of each draft.

        Args:
            features: [B, T, 3 * hidden].
            embeddings: of the token after each position, [B, T, hidden].

        Returns:
            Of draft s [B, T - s, subset]: at i the logits of the token at i + 2 + s, after drafts that were right.
        """
        batch, num, _ = features.shape
        spec, dim = self.spec, self.spec.head_dim
        repeats = spec.num_heads // spec.num_kv_heads
        x = F.linear(features, self.fc)
        causal = torch.ones(num, num, dtype=torch.bool).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(NUM_DRAFTS):
            num_bases = num - step
            x = x[:, :num_bases]
            inputs = torch.cat((self._norm(embeddings[:, step:], 1), self._norm(x, 0)), -1)
            q, k, v = (F.linear(inputs, weight).view(batch, num_bases, -1, dim) for weight in self.qkv)
            cos, sin = (each[step : step + num_bases] for each in self.angles)
            q = _rotate(q, cos, sin)
            keys.append(_rotate(k, cos, sin).repeat_interleave(repeats, 2))
            values.append(v.repeat_interleave(repeats, 2))
            # The first draft's keys up to the base, then one of each further draft of the same base.
            scores = torch.einsum("bqhd,bkhd->bhqk", q, keys[0][:, :num_bases])
            scores = scores.masked_fill(~causal[:num_bases, :num_bases], float("-inf"))
            own = [torch.einsum("bqhd,bqhd->bhq", q, k[:, :num_bases])[..., None] for k in keys[1:]]
            shares = torch.softmax(torch.cat([scores, *own], -1) * dim**-0.5, -1)
            out = torch.einsum("bhqk,bkhd->bqhd", shares[..., :num_bases], values[0][:, :num_bases])
            for index, value in enumerate(values[1:]):
                out = out + shares[..., num_bases + index].transpose(1, 2)[..., None] * value[:, :num_bases]
            x = x + F.linear(out.flatten(2), self.o)
            h = self._norm(x, 2)
            x = x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)
            found.append(F.linear(self._norm(x, 3), self.logits))
        return found


class Batch(NamedTuple):
    """Answers of similar length, padded at the end: ids and features of all positions, `counts`: of answers' tokens."""

    ids: Tensor
    features: Tensor
    states: Tensor
    counted: Tensor


def batches(target: Target, answers: Sequence[Answer]) -> list[Batch]:
    """All answers with the model's features."""
    found = []
    by_length = sorted(answers, key=lambda each: len(each.prompt) + len(each.answer))
    for start in range(0, len(by_length), BATCH):
        some = by_length[start : start + BATCH]
        rows = [torch.tensor(each.prompt + each.answer)[:MAX_LEN] for each in some]
        computed = [target.forward(row) for row in rows]
        counted = [torch.arange(len(row)) >= len(each.prompt) for row, each in zip(rows, some, strict=True)]
        columns = rows, [each[0] for each in computed], [each[1] for each in computed], counted
        found.append(Batch(*(nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns)))
    return found


def train(target: Target, answers: Sequence[Answer], epochs: int, rate: float) -> tuple[Head, Tensor]:
    """A head, and its ids."""
    counts = torch.bincount(
        torch.tensor([token for each in answers for token in each.answer]), minlength=target.spec.vocab_size
    )
    subset = counts.float().add(-torch.arange(len(counts)) * 1e-6).topk(SUBSET).indices.sort().values
    head = Head(target, subset)
    data = batches(target, answers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    num_steps = epochs * len(data)
    warm = max(1, num_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 1.0) * max(0.02, 1 - step / num_steps),
    )
    source = random.Random(0)
    for _ in range(epochs):
        source.shuffle(data)
        for batch in data:
            loss = _loss(target, head, subset, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return head, subset


def _loss(target: Target, head: Head, subset: Tensor, batch: Batch) -> Tensor:
    """Cross entropy with the model's probabilities over the subset, at tokens of answers."""
    ids, features, states, counted = batch
    found = head(features[:, :-1].float(), target.embeddings[ids[:, 1:]])
    rows = target.weights.get("lm_head.weight", target.embeddings)[subset]
    loss = torch.zeros(())
    for step, logits in enumerate(found):
        # Base i drafts the token at i + 2 + step, with the probabilities of the state before it.
        num = logits.shape[1] - 1
        is_counted = counted[:, 2 + step : 2 + step + num]
        labels = torch.softmax(states[:, 1 + step : 1 + step + num][is_counted] @ rows.T, -1)
        chosen = F.log_softmax(logits[:, :num][is_counted], -1)
        loss = loss - DEPTH_WEIGHT**step * (labels * chosen).sum(-1).mean()
    return loss


@torch.no_grad()
def evaluate(target: Target, trained: tuple[Head, Tensor], answers: Sequence[Answer]) -> list[float]:
    """Share of right drafts by position; of the second, those after a right first one."""
    head, subset = trained
    tried, right = torch.zeros(NUM_DRAFTS), torch.zeros(NUM_DRAFTS)
    for batch in batches(target, answers):
        found = head(batch.features[:, :-1].float(), target.embeddings[batch.ids[:, 1:]])
        alive = torch.ones(found[0].shape[:2], dtype=torch.bool)
        for step, logits in enumerate(found):
            num = logits.shape[1] - 1
            is_right = subset[logits[:, :num].argmax(-1)] == batch.ids[:, 2 + step : 2 + step + num]
            alive = alive[:, :num] & batch.counted[:, 2 + step : 2 + step + num]
            tried[step] += alive.sum()
            alive = alive & is_right
            right[step] += alive.sum()
    return (right / tried).tolist()


if __name__ == "__main__":
    main()
