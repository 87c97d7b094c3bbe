"""Tiny models with a vision tower, their image processor, pictures, and samples that have some."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from rltool.algorithms.batch import Ragged, TrainBatch
from rltool.models.pictures import Place
from tests.e2e.megatron_models import VOCAB, policy_batch, save_hf

PAD, START, END = VOCAB - 4, VOCAB - 2, VOCAB - 1
PATCH, MERGE = 16, 2
SIDE = PATCH * MERGE


def save_model(directory: Path, kind: str = "qwen3_vl", *, tied: bool = False) -> Path:
    save_hf(directory, kind, tied)
    save_image_processor(directory)
    return directory


def save_image_processor(directory: Path) -> None:
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    size = {"shortest_edge": SIDE * SIDE, "longest_edge": 16 * SIDE * SIDE}
    Qwen2VLImageProcessor(
        patch_size=PATCH, merge_size=MERGE, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(directory)


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of noise in blocks, which survives resizing."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (5, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    stream = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST).save(stream, "png")
    return stream.getvalue()


def pixels_of(directory: Path, files: list[bytes]) -> dict[str, torch.Tensor]:
    """pixel_values and image_grid_thw by transformers; {} of no pictures."""
    from PIL import Image
    from transformers import AutoImageProcessor

    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    return dict(AutoImageProcessor.from_pretrained(directory)(images=images, return_tensors="pt")) if images else {}


def batch_with_pictures(directory: Path, samples: list[tuple[int, list[bytes]]], seed: int = 3) -> TrainBatch:
    """samples: tokens of text, and pictures, which stand between the first of them."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    places: list[list[int]] = []
    for length, files in samples:
        text = torch.randint(0, PAD, (length,), generator=generator).tolist()
        row, own = text[:2], []
        for number, file in enumerate(files):
            _, height, width = pixels_of(directory, [file])["image_grid_thw"][0].tolist()
            place = Place(len(row) + 1, height // MERGE, width // MERGE, len(file))
            row += [START, *[PAD] * place.tokens, END, text[2 + number]]
            own += place
        rows.append(row + text[2 + len(files) :])
        places.append(own)
    batch = policy_batch([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    # A loss on no token of a picture: the policy samples none.
    mask = batch.loss_mask * (tokens < PAD)
    mask[(batch.lengths.cumsum(0) - batch.lengths)] = 0
    files = [b"".join(own) for _, own in samples]
    return batch.replace(
        tokens=tokens, loss_mask=mask, loss_weights=batch.loss_weights * mask,
        picture_places=Ragged(
            torch.tensor([n for own in places for n in own]), torch.tensor([len(own) for own in places])
        ),
        picture_files=Ragged(
            torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), torch.tensor([len(own) for own in files])
        ),
    )  # fmt: skip


def hf_picture_logprobs(
    model, directory: Path, tokens: torch.Tensor, files: list[bytes], pad: int = PAD
) -> torch.Tensor:
    """[T] of one sample by transformers: log p(tokens[t] | before), 0 for the first."""
    inputs = pixels_of(directory, files)
    types = (tokens == pad).int()[None]
    logits = model(tokens[None], mm_token_type_ids=types, **inputs).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return torch.cat([torch.zeros(1), logprobs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)])
