"""Speed of a trainer on samples with pictures: tokens/s of an optimizer step and where the time goes, on random weights
of Qwen3-VL's shapes.

    python -m benchmarks.vision_speed --shape 2B

Prints one line of JSON: seconds of the vision tower for each picture, with its image processor; of an optimizer step
whose pictures are new, and of one whose features are kept; tokens/s and peak memory of the latter; and the same step
with as many tokens of text alone. Each picture is of --pixels a side and has --samples samples, as in a group of GRPO.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.trainer_speed import randomise
from rltool.algorithms.batch import Ragged, TrainBatch
from rltool.algorithms.schedule import plan_micro_batches
from rltool.config.algorithm import AlgorithmConfig
from rltool.config.sections import ModelConfig, OptimizerConfig, TrainerConfig
from rltool.megatron.pictures import VisionTower
from rltool.megatron.runtime import Rendezvous
from rltool.megatron.trainer import MegatronTrainer, TrainingRun
from rltool.models.pictures import Place, token_grid
from rltool.models.weight_files import CARRIED
from rltool.processes.ports import reserved_ports

IDS = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2B": (
        dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, vocab_size=151936, mrope_section=[24, 20, 20]),
        dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, num_position_embeddings=2304,
             deepstack_visual_indexes=[5, 11, 17]),
    ),
    "tiny": (
        dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, vocab_size=151936, mrope_section=[6, 5, 5]),
        dict(depth=3, hidden_size=64, intermediate_size=128, num_heads=2, num_position_embeddings=64,
             deepstack_visual_indexes=[0, 1]),
    ),
}  # fmt: skip
"""Language model and vision tower; of the released 2B."""


def write_model(directory: Path, shape: str, dtype: torch.dtype) -> None:
    """config.json, image processor, and a tower of random weights; the language model has none."""
    from transformers import AutoModel, Qwen3VLConfig
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    text, vision = SHAPES[shape]
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=text["mrope_section"], mrope_interleaved=True)
    text = {key: value for key, value in text.items() if key != "mrope_section"} | dict(rope_parameters=rope)
    ids: dict[str, Any] = IDS
    config = Qwen3VLConfig(
        text_config=text | dict(max_position_embeddings=262144, tie_word_embeddings=True),
        vision_config=vision | dict(patch_size=16, out_hidden_size=text["hidden_size"]),
        tie_word_embeddings=True, architectures=["Qwen3VLForConditionalGeneration"], **ids,
    )  # fmt: skip
    config.save_pretrained(directory)
    size = {"shortest_edge": 256 * 32 * 32, "longest_edge": 16384 * 32 * 32}
    Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size).save_pretrained(directory)
    tower = AutoModel.from_config(config.vision_config, dtype=dtype)
    save_file({f"model.visual.{name}": t.contiguous() for name, t in tower.state_dict().items()}, directory / CARRIED)


def picture(pixels: int, seed: int) -> bytes:
    from PIL import Image

    noise = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise.numpy()).resize((pixels, pixels)).save(stream, "png")
    return stream.getvalue()


def batch_of(args: argparse.Namespace, trainer: MegatronTrainer, seed: int) -> TrainBatch:
    """args.pictures groups of args.samples samples: a picture, a prompt and a response."""
    pictures = trainer.family.pictures
    assert pictures is not None
    least, most = 256 * 32 * 32, 16384 * 32 * 32
    rows, columns = token_grid(args.pixels, args.pixels, pictures, least=least, most=most)
    files = [picture(args.pixels, seed * args.pictures + i) for i in range(args.pictures) for _ in range(args.samples)]
    places = [Place(1, rows, columns, len(file)) for file in files]
    length, generator = rows * columns + args.text, torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (len(files), length), generator=generator)
    tokens[:, 1 : 1 + rows * columns] = pictures.token
    mask = torch.zeros(len(files), length)
    mask[:, rows * columns + args.text // 4 :] = 1.0
    lengths = torch.full((len(files),), length)
    return TrainBatch(
        tokens=tokens.flatten(), lengths=lengths, loss_mask=mask.flatten(), rewards=torch.zeros(len(files)),
        group_ids=torch.arange(len(files)) // args.samples, loss_weights=mask.flatten(),
        advantages=torch.randn(mask.numel(), generator=generator) * mask.flatten(),
        picture_places=Ragged(torch.tensor(places).flatten(), torch.full((len(files),), len(Place._fields))),
        picture_files=Ragged(
            torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), torch.tensor([len(x) for x in files])
        ),
    )  # fmt: skip


def measure(args: argparse.Namespace, directory: Path, port: int) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    write_model(directory, args.shape, dtype)
    trainer = MegatronTrainer(
        ModelConfig(path=directory, dtype=args.dtype), TrainerConfig(recompute=args.recompute),
        OptimizerConfig(lr=1e-6), AlgorithmConfig(), Rendezvous(0, "127.0.0.1", port, timeout=60.0), TrainingRun(100),
    )  # fmt: skip
    cuda = trainer.runtime.device.type == "cuda"

    def timed(action: Callable[[], Any]) -> float:
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def step(batch: TrainBatch) -> None:
        plan = plan_micro_batches(batch.lengths.tolist(), max_tokens=args.tokens, data_parallel=1)
        micro_batches = [batch.micro_batch(samples) for samples in plan[0]]
        trainer.forward_backward(micro_batches, global_loss_tokens=batch.num_loss_tokens, on_policy=True)
        trainer.optimizer_step()

    with closing(trainer):
        randomise(trainer)
        tower, pictures = trainer.tower, trainer.family.pictures
        assert isinstance(tower, VisionTower) and pictures is not None
        tower.features(picture(args.pixels, 10**6))  # kernels
        files = [picture(args.pixels, 10**6 + 1 + i) for i in range(8)]
        seconds = timed(lambda: [tower.features(file) for file in files]) / len(files)
        step(batch_of(args, trainer, 0))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        batch = batch_of(args, trainer, 1)
        fresh, kept = timed(lambda: step(batch)), min(timed(lambda: step(batch)) for _ in range(args.steps))
        text = batch.replace(tokens=batch.tokens.clamp(max=1000), picture_places=None, picture_files=None)
        plain = min(timed(lambda: step(text)) for _ in range(args.steps))
        return {
            "shape": args.shape, "device": torch.cuda.get_device_name() if cuda else "cpu", "dtype": args.dtype,
            "tokens_per_picture": int((batch.tokens == pictures.token).sum()) // batch.num_samples,
            "tokens": len(batch.tokens), "tower_seconds_per_picture": round(seconds, 4),
            "step_seconds_new_pictures": round(fresh, 3), "step_seconds_kept_features": round(kept, 3),
            "step_seconds_text_alone": round(plain, 3), "tokens_per_second": round(len(batch.tokens) / kept),
            "tokens_per_second_new_pictures": round(len(batch.tokens) / fresh),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="2B")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pictures", type=int, default=16, help="of an optimizer step")
    parser.add_argument("--samples", type=int, default=8, help="of each picture")
    parser.add_argument("--pixels", type=int, default=768, help="of a picture's side")
    parser.add_argument("--text", type=int, default=512, help="tokens beside a picture's, a quarter of them prompt")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--steps", type=int, default=2, help="measured; the fastest counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, reserved_ports(1) as held:
        port = held.ports[0]
        held.release()
        print(json.dumps(measure(args, Path(directory), port)))


if __name__ == "__main__":
    main()
