"""A small tower on real weights: `LLM.chat` gives transformers' answers about pictures, and right ones.

`benchmarks/vision/train_shapes.py` trains the tower through the default model. An error in pixels, places of rows,
prefixes or chunks shows as another answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.vision import train_shapes
from engine import LLM, SamplingParams

NUM_PICTURES = 12
LEAST_RIGHT = 0.55
"""0.31 are right by chance; 0.69 of the answers about 25 pictures were."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_about_pictures_are_right_and_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    shares = train_shapes.make_model(tmp_path, 6000, 480, NUM_PICTURES)
    assert sum(shares.values()) / len(shares) >= LEAST_RIGHT, shares
    reference = transformers.SmolVLMForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    end = reference.config.text_config.eos_token_id
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    right = total = 0

    with LLM(str(tmp_path), dtype="float32", chunked_prefill_size=16, page_size=4, mm_detail="high") as llm:
        for number in range(NUM_PICTURES):
            picture = train_shapes.draw(train_shapes.HELD_OUT + number)
            image = {"type": "image", "image": Image.fromarray(picture.pixels)}
            asked = [{"type": "text", "text": question} for question in train_shapes.QUESTIONS]
            outputs = llm.chat([[{"role": "user", "content": [image, text]}] for text in asked], greedy)
            for output, answer in zip(outputs, picture.answers, strict=True):
                prompt = torch.tensor([output.prompt_token_ids])
                expected = (
                    reference.eval()
                    .generate(
                        input_ids=prompt,
                        attention_mask=torch.ones_like(prompt),
                        pixel_values=train_shapes.pixels_of([picture])[None],
                        max_new_tokens=4,
                        do_sample=False,
                    )[0, prompt.shape[1] :]
                    .tolist()
                )
                ids = [token for token in output.token_ids if token != end]
                assert ids == [token for token in expected if token != end]
                right += output.text == answer
                total += 1

    assert right / total >= LEAST_RIGHT
