"""Train the tiny model's vision tower on made-up pictures; the text model stays as it is.

python examples/tiny/train_tower.py --out deltic/models/tiny

What the tower makes of a picture stands among the embeddings of a conversation's tokens, and the loss is that of what
the model says of it.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from batches import IGNORE
from data import SYSTEMS, Message, Sample, assistant, make_sample, pieces
from drawings import COLOURS, DIGITS, SHAPES, Scene, draw, make_scene, worn
from model import IMAGE, load_model, load_tower, save_tower
from network import AXES, SHAPE, Network
from optimizer import Optimizer, Rates
from phrases import TRAIN
from questions import questions
from render import render
from sketches import sketch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tower import TOWER, Tower, target_size
from train import prepare, rate_factor

PICTURE = "<|vision_start|>" + IMAGE + "<|vision_end|>"
WIDTH = 128  # tokens of a row


@dataclass(frozen=True)
class Album:
    """Pictures of one size, and a conversation about each.

    `pixels` uint8 [n, height, width, 3]; `ids`, `labels` [n, WIDTH] (a token's is the next one, where the model says
    it); `turned` [n, WIDTH, 3]: rotary positions; `facts` [n, 4]: kinds, colours and sides as numbers.
    """

    pixels: Tensor
    ids: Tensor
    labels: Tensor
    turned: Tensor
    facts: Tensor

    def to(self, device: torch.device) -> Album:
        return Album(*(t.to(device, non_blocking=True) for t in vars(self).values()))

    def pin_memory(self) -> Album:
        return Album(*(t.pin_memory() for t in vars(self).values()))


def picture_size(rng: random.Random) -> tuple[int, int]:
    """Height and width that some picture is scaled to: of up to four times as long as wide, mostly of less."""
    aspect = 4 ** rng.choice([0, rng.uniform(-0.5, 0.5), rng.uniform(-1, 1)])
    return target_size(round(1000 / aspect**0.5), round(1000 * aspect**0.5))


def drawn(scene: Scene, rng: random.Random, size: tuple[int, int]) -> np.ndarray:
    """A picture as the model's processor scales it, from some other size."""
    height, width = size
    scale = rng.choice([1.0, rng.uniform(0.4, 1.0), rng.uniform(1.0, 3.0)])
    image = worn(draw(scene, rng, round(scale * width), round(scale * height)), rng)
    return np.asarray(image if image.size == (width, height) else image.resize((width, height), 3))


def conversation(scene: Scene, rng: random.Random) -> Sample:
    """A few turns about a picture, shown with the first of them or, at times, after something else."""
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS[TRAIN])})
    about = questions(scene)
    rng.shuffle(about)
    about = about[: rng.choices([1, 2, 3, 4], [40, 25, 20, 15])[0]]
    thinking = rng.random() < 0.1
    turns = [(question.asked(rng), question.answer) for question in about]
    shown = 0
    if rng.random() < 0.2:  # something else between or before
        other = make_sample(rng.randrange(10**6), rng.randrange(10**9), TRAIN)
        if len(other.messages) == 1 and other.target["content"] and "tool_calls" not in other.target:
            at = rng.randint(0, len(turns))
            turns.insert(at, (other.messages[0]["content"], other.target["content"]))
            shown = int(at == 0)
    for index, (asked, said) in enumerate(turns):
        if index == shown:
            asked = PICTURE + _typed(asked, rng) if rng.random() < 0.9 else _typed(asked, rng) + PICTURE
        elif index > shown:
            asked = _typed(asked, rng)
        messages += [{"role": "user", "content": asked}, assistant("", said)]
    seen = questions(scene)[0].answer.replace("This is", "I see").replace("These are", "I see")
    target = assistant(seen, turns[-1][1]) if thinking else messages[-1]
    return Sample("picture", messages[:-1], target, None, thinking)


def _typed(text: str, rng: random.Random) -> str:
    draw = rng.random()
    return text.lower() if draw < 0.1 else text.rstrip("?.") if draw < 0.2 else text


Line = tuple[list[int], list[int], list[list[int]]]


def row_of(tokenizer: Tokenizer, sample: Sample, tokens: tuple[int, int]) -> Line | None:
    """Ids, labels and rotary positions of a conversation whose picture has so many rows and columns of tokens; None if
    they are more than WIDTH."""
    image, (rows, columns) = tokenizer.token_to_id(IMAGE), tokens
    line: list[int] = []
    spoken: list[bool] = []
    places: list[list[int]] = []
    at = 0
    for text, said in pieces(render([*sample.messages, sample.target], None)):
        for token in tokenizer.encode(text).ids:
            count = rows * columns if token == image else 1
            line += [token] * count
            spoken += [said] * count
            if token == image:
                places += [[at, at + row, at + column] for row in range(rows) for column in range(columns)]
                at += max(rows, columns)
            else:
                places.append([at] * 3)
                at += 1
    if len(line) > WIDTH:
        return None
    labels = [token if said else IGNORE for token, said in zip(line[1:], spoken[1:], strict=True)] + [IGNORE]
    return line, labels, places


def facts_of(scene: Scene) -> list[int]:
    """What is on a picture as four numbers: the kinds and colours of the first piece and the last, how many, and the
    first one's side."""
    kinds = (*SHAPES, *DIGITS)
    first, last = scene.pieces[0], scene.pieces[-1]
    return [
        kinds.index(first.kind) * len(COLOURS) + COLOURS.index(first.colour),
        kinds.index(last.kind) * len(COLOURS) + COLOURS.index(last.colour),
        len(scene.pieces) - 1,
        ("left", None, "right").index(scene.side(first)),
    ]


FACTS = (len(SHAPES + DIGITS) * len(COLOURS), len(SHAPES + DIGITS) * len(COLOURS), 5, 3)


def make_album(tokenizer: Tokenizer, rng: random.Random, count: int, other_path: bool = False) -> Album:
    """So many pictures of one size; `other_path`: as `sketches` draws them."""
    size = picture_size(rng)
    tokens = size[0] // TOWER.unit, size[1] // TOWER.unit
    pixels = np.empty((count, *size, 3), dtype=np.uint8)
    ids, labels = torch.zeros(count, WIDTH, dtype=torch.int32), torch.full((count, WIDTH), IGNORE, dtype=torch.int32)
    turned, facts = torch.zeros(count, WIDTH, 3, dtype=torch.int16), torch.zeros(count, len(FACTS), dtype=torch.int16)
    for i in range(count):
        scene = make_scene(rng, size[1] / size[0] * rng.uniform(0.92, 1.08))
        pixels[i] = sketch(scene, rng, size) if other_path else drawn(scene, rng, size)
        found = None
        while found is None:
            found = row_of(tokenizer, conversation(scene, rng), tokens)
        line, said, places = found
        ids[i, : len(line)], labels[i, : len(line)] = torch.tensor(line), torch.tensor(said)
        turned[i, : len(line)] = torch.tensor(places)
        facts[i] = torch.tensor(facts_of(scene))
    return Album(torch.from_numpy(pixels), ids, labels, turned, facts)


class Albums(IterableDataset[Album]):
    """Albums without end; each worker makes its own."""

    def __init__(self, folder: Path, seed: int, count: int) -> None:
        self.folder, self.seed, self.count = folder, seed, count

    def __iter__(self) -> Iterator[Album]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/pictures/{worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        while True:
            yield make_album(tokenizer, rng, self.count)


def pixels_of(album: Album, training: bool) -> Tensor:
    """[n, 3, height, width] from -1 to 1; in training with noise, and brighter or darker by a little."""
    pixels = album.pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    if training:
        n, device = len(pixels), pixels.device
        noise = 0.25 * torch.rand(n, 1, 1, 1, device=device).pow(2) * (torch.rand(n, 1, 1, 1, device=device) < 0.4)
        light = 1 + 0.08 * torch.randn(n, 1, 1, 1, device=device)
        tint = 0.03 * torch.randn(n, 3, 1, 1, device=device)
        pixels = ((pixels + 1) * light - 1 + tint + noise * torch.randn_like(pixels)).clamp(-1, 1)
    return pixels


class Guide(nn.Module):
    """Tells, in training, what is on a picture from the rows that the tower makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(SHAPE.hidden, len(FACTS))
        self.fact = nn.ModuleList(nn.Linear(SHAPE.hidden, n) for n in FACTS)

    def forward(self, rows: Tensor, facts: Tensor) -> Tensor:
        rows = F.rms_norm(rows.float(), rows.shape[-1:])
        mixed = self.query(rows).softmax(1).transpose(1, 2) @ rows
        return torch.stack([F.cross_entropy(fact(mixed[:, i]).float(), facts[:, i].long())
                            for i, fact in enumerate(self.fact)]).sum()  # fmt: skip


class Reader(nn.Module):
    """The text model behind its embeddings."""

    def __init__(self, text: Network) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return self.text.seeing(x, place, turned)


class Model(nn.Module):
    """The tower with the text model it speaks through, which stays as it is."""

    def __init__(self, text: Network, image: int) -> None:
        super().__init__()
        self.tower, self.guide = Tower(), Guide()
        self._text, self.image = [text], image  # not among the parameters
        self.readers = [Reader(text)]

    def record(self, rows: int) -> None:
        """From now on let the GPU replay what the text model does with so many rows, in training."""
        device = next(self.tower.parameters()).device
        turned = torch.zeros(rows, WIDTH, len(AXES), device=device)
        first, second = (torch.randn(rows, WIDTH, SHAPE.hidden, device=device, requires_grad=True) for _ in range(2))
        replayed = torch.cuda.make_graphed_callables(Reader(self._text[0]), (first, turned))
        grads = []
        for reader in (self.readers[0], replayed):
            [grad] = torch.autograd.grad(reader(second, turned).float().square().mean(), second)
            grads.append(grad.clone())
        if not (grads[0] - grads[1]).norm() < 0.05 * grads[0].norm():
            raise RuntimeError("what the GPU replays is not what it computes")
        self.readers.append(replayed)

    def forward(self, album: Album, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Logits where the model speaks, the labels there, and the rows of the pictures."""
        [text] = self._text
        rows = self.tower(pixels_of(album, training)).float()
        ids = album.ids.long()
        x = text.model.embed_tokens(ids).masked_scatter((ids == self.image).unsqueeze(-1), rows)
        turned = torch.stack([album.turned[..., axis] for axis in AXES], -1).float()
        hidden = self.readers[-1 if training else 0](x, turned)
        said = album.labels.flatten() != IGNORE
        return text.logits(hidden.flatten(0, 1)[said]), album.labels.flatten()[said].long(), rows


@torch.no_grad()
def answers(model: Model, albums: list[Album]) -> Iterator[tuple[list[int], list[int]]]:
    """What the model should say at each place where it speaks, and what greedy decoding gives there as long as it is
    right."""
    for album in albums:
        logits, labels, _ = model(album, False)
        said = album.labels != IGNORE
        ends = (said & ~F.pad(said, (0, 1))[:, 1:])[said].nonzero().flatten() + 1
        given, wanted, begin = logits.argmax(-1).tolist(), labels.tolist(), 0
        for end in ends.tolist():
            yield wanted[begin:end], given[begin:end]
            begin = end


def accuracy(model: Model, albums: list[Album]) -> float:
    """Share of answers that greedy decoding gives letter by letter."""
    marks = [wanted == given for wanted, given in answers(model, albums)]
    return sum(marks) / len(marks)


def by_kind(model: Model, albums: list[Album], tokenizer: Tokenizer) -> str:
    """The same by how answers begin, with some that are wrong."""
    marks: dict[str, list[bool]] = defaultdict(list)
    wrong = []
    for wanted, given in answers(model, albums):
        text = tokenizer.decode(wanted)
        marks[" ".join(text.split()[:3])].append(wanted == given)
        if wanted != given:
            wrong.append(f"    wanted {text!r}  given {tokenizer.decode(given)!r}")
    rows = [f"{name:28} {sum(of):5} / {len(of):5}" for name, of in sorted(marks.items()) if len(of) > 3]
    return "\n".join([*rows, *wrong[:: max(1, len(wrong) // 12)][:12]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the text model, for the tower's file")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=256, help="pictures of a step, all of one size")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--again", type=int, default=2, help="how often a picture is used")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
    parser.add_argument("--guide", type=float, default=0.3, help="weight of what is asked of the tower's rows directly")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--start", type=Path, help="begin with the tower of this folder")
    parser.add_argument("--report", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=8, help="albums to measure on")
    args = parser.parse_args()
    device = prepare(args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    image = tokenizer.token_to_id(IMAGE)
    albums = Albums(args.out, args.seed, args.batch)
    loader = iter(DataLoader(albums, batch_size=None, num_workers=args.workers, pin_memory=device.type == "cuda",
                             prefetch_factor=4 if args.workers else None))
    text = load_model(args.out).to(device).eval().requires_grad_(False)
    model = Model(text, image).to(device)
    if args.start:
        model.tower.load_state_dict(load_tower(args.start).state_dict())
    held = {name: [make_album(tokenizer, random.Random(f"held out {name} {i}"), 96, name == "sketched").to(device)
                   for i in range(args.held_out)] for name in ("drawn", "sketched")}
    print(f"{sum(p.numel() for p in model.tower.parameters())} parameters, {device}", flush=True)
    optimizer = Optimizer(model, Rates())
    if device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            model.record(args.batch)
    began = last = time.perf_counter()
    losses: list[Tensor] = []
    step, album, used = 0, next(loader).to(device), 0
    while True:
        now = time.perf_counter()
        progress = max(step / args.steps, (now - began) / args.seconds)
        done = progress >= 1
        if done or now - last > args.report:
            mean = torch.stack(losses).mean(0).tolist() if losses else []
            model.eval()
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
                marks = "  ".join(f"{name} {100 * accuracy(model, some):.1f} %" for name, some in held.items())
            model.train()
            losses_now = " ".join(f"{loss:.4f}" for loss in mean)
            print(f"step {step:5}  loss {losses_now}  {marks}  {now - began:.1f} s", flush=True)
            save_tower(model.tower, args.out)
            losses, last = [], time.perf_counter()
        if done:
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
                for name, some in held.items():
                    print(f"{name}\n{by_kind(model, some, tokenizer)}", flush=True)
            break
        if used == args.again:
            album, used = next(loader).to(device), 0
        used += 1
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            logits, labels, rows = model(album, True)
            loss = F.cross_entropy(logits.float(), labels)
            guided = model.guide(rows, album.facts)
        (loss + args.guide * (1 - progress) * guided).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(args.rate * rate_factor(progress, step, args.warmup))
        losses.append(torch.stack([loss.detach(), guided.detach()]))
        step += 1


if __name__ == "__main__":
    main()
