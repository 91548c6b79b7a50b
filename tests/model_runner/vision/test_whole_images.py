"""Images whose tokens attend to all of them, against a tiny random Gemma 3 of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.attention.fa3 import FlashAttention3
from engine.model_runner.vision.encoder_rows import ends_of_images

from .test_images import IMAGE_ID, MakeSeeing, Pictures, Seeing, make_seeing, pictures, scores

__all__ = ["make_seeing", "pictures"]  # fixtures


def cuts_of(tokens: list[int], chunk: int) -> list[int]:
    """Ends of chunks of about this length, none of which is within an image."""
    ends: list[int] = []
    for end in range(1, len(tokens) + 1):
        within = end < len(tokens) and tokens[end] == tokens[end - 1] == IMAGE_ID
        if not within and (end == len(tokens) or end - (ends[-1] if ends else 0) >= chunk):
            ends.append(end)
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [2, 0, 1, 3])
def test_chunks_between_images(
    make_seeing: MakeSeeing,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    num_images: int,
) -> None:
    seeing = make_seeing("gemma3")
    images = [seeing.tiles(seed) for seed in range(num_images)]
    tokens = seeing.prompt(images)
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    encodes = tuple(kept.encode(image) for image in images)
    expected = seeing.logprobs(tokens, images)
    target = expected[torch.arange(len(tokens) - 1), tokens[1:]].numpy()

    for chunk in (1, 3, 7, 12, len(tokens)):
        req = kept.start(driver, tokens, encodes)
        found: list[float] = []
        for end in cuts_of(tokens, chunk):
            work = [(req, end - req.computed)]
            result = driver.step(work, encodes=encodes if not req.computed else ())
            found += scores(unpack, result) if result.prompt_logprobs else []
        np.testing.assert_allclose(found, target, atol=1e-4, err_msg=f"chunks of {chunk}")
        while len(req.output) < 4:
            driver.step([(req, 1)])
        follows = seeing.logprobs(tokens + req.output, images)[len(tokens) - 1 : -1].argmax(-1)
        assert follows.tolist() == req.output
        driver.finish(req)


@pytest.mark.slow
def test_two_rows_a_shared_prefix_and_a_prompt_of_text(
    make_seeing: MakeSeeing, make_driver: Any, unpack: Any, pictures: Callable[[Seeing], Pictures]
) -> None:
    """A prefix that ends after an image is reused; in one step are two requests with images, text and a decode."""
    seeing = make_seeing("gemma3")
    first, second = seeing.tiles(1), seeing.tiles(2)
    kept, driver = pictures(seeing), make_driver(seeing.spec, seeing.folder, num_encoder_rows=64)
    encodes = (kept.encode(first), kept.encode(second))
    decoding = driver.start([4, 8, 15])
    driver.step([(decoding, 3)])
    donor_tokens = seeing.prompt([first])
    donor = kept.start(driver, donor_tokens, encodes[:1])
    driver.step([(donor, 16)], encodes=encodes[:1])
    assert donor_tokens[14] == IMAGE_ID != donor_tokens[15]
    tokens = seeing.prompt([first, second])
    tokens[:16] = donor_tokens[:16]
    req = kept.start(driver, tokens, encodes, prefix=(donor, 16))
    text = driver.start([3, 1, 4, 1, 5])
    other = kept.start(driver, seeing.prompt([second], seed=3), encodes[1:])

    rest = len(donor_tokens) - 16
    work = [
        (donor, rest),
        (req, len(tokens) - 16),
        (other, len(other.tokens)),
        (text, 5),
        (decoding, 1),
    ]
    result = driver.step(work, encodes=encodes[1:])

    expected = seeing.logprobs(tokens, [first, second])
    target = expected[torch.arange(16, len(tokens) - 1), tokens[17:]]
    np.testing.assert_allclose(scores(unpack, result, 1), target, atol=1e-4)
    expected = seeing.logprobs(other.tokens[:-1], [second])
    target = expected[torch.arange(len(other.tokens) - 2), other.tokens[1:-1]]
    np.testing.assert_allclose(scores(unpack, result, 2), target, atol=1e-4)
    assert decoding.output[0] == seeing.logprobs([4, 8, 15], [])[-1].argmax()
    assert text.output[0] == seeing.logprobs([3, 1, 4, 1, 5], [])[-1].argmax()


def test_ends_of_images() -> None:
    media = np.array([[3, 4, 20], [9, 2, 40]])
    positions = np.array([0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 8, 9, 10, 11])

    chunks = [(0, 0, 8, media), (8, 12, 2, media), (10, 8, 4, media)]
    found = ends_of_images(positions, chunks)

    assert found.tolist() == [1, 2, 3, 7, 7, 7, 7, 8, 13, 14, 9, 11, 11, 12]
    blocks = np.array([[1, 2, 20], [3, 2, 40], [6, 1, 60]])  # the first image has rows in two places
    assert ends_of_images(np.arange(8), [(0, 0, 8, blocks)]).tolist() == [1, 5, 5, 5, 5, 6, 7, 8]
    with pytest.raises(AssertionError, match="a cut within an image"):
        ends_of_images(np.arange(5), [(0, 0, 5, media)])
    with pytest.raises(AssertionError, match="a cut within an image"):
        ends_of_images(np.arange(4, 8), [(0, 4, 4, media)])


def test_fa3_refuses_such_models_by_their_reason(make_seeing: MakeSeeing) -> None:
    spec = make_seeing("gemma3").spec
    cpu, bf16 = torch.device("cpu"), torch.bfloat16

    reasons = FlashAttention3.reasons_against(spec, cpu, bf16, bf16)

    assert "attends to earlier tokens only, and those of an image see all of it" in reasons
    assert not CpuNativeAttention.reasons_against(spec, cpu, bf16, bf16)
