"""Train the tiny model's draft head, which guesses the tokens after the next one, on the finished model.

python examples/tiny/train_head.py --out deltic/models/tiny

Column i of the head reads token i and the model's last hidden state of position i - 1, and guesses token i + 1.
A further draft reads the token just guessed and the head's own output in place of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Batch, whole
from data import heldout_set
from model import load_head, load_model, save_head
from network import SHAPE, Layer, Network, Norm, own_past
from phrases import evaluate_on
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import compiled, conversations, options, prepare, train

WEIGHTS = (1.0, 0.7, 0.5)  # of the losses of the first, second and third draft


class Head(nn.Module):
    """The head, its modules named as Qwen3.5's checkpoints name the tensors below `mtp.`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * SHAPE.hidden, SHAPE.hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Norm(SHAPE.hidden) for _ in range(3))
        self.layers = nn.ModuleList([Layer(SHAPE, "full_attention")])
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, embedded: Tensor, hidden: Tensor, place: Tensor) -> list[Tensor]:
        """The head's outputs of every row as first, second and third draft.

        `embedded` [rows, width, hidden]: the embeddings of the tokens; `hidden`, of that shape: the model's hidden
        states after its last norm; `place` [rows, width]: each token's place in its conversation. Column i of draft d
        is the end of a chain that began at column i - d + 1.
        """
        before: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for seen in masks(own_past(place), len(WEIGHTS)):
            last = F.pad(hidden, (0, 0, 1, -1)) * (place > 0).unsqueeze(-1)
            x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(last)], -1))
            x, keys = self.layers[0](x.float(), place, seen, before)
            before = [*before, keys]
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs


def masks(past: Tensor, drafts: int) -> Iterator[Tensor]:
    """Which columns those of each draft attend to: [rows, 1, width, width * draft] over those of drafts 1 to `draft`.

    When a chain begins, the columns up to its own are made from the model's hidden states, and each draft adds one.
    """
    for draft in range(drafts):
        chain = [past.tril(-back).triu(-back) for back in reversed(range(draft))]
        yield torch.cat([past.tril(-draft), *chain], -1)


@torch.no_grad()
def read(trunk: Network, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings and hidden states, and where the next token is said and is the model's first choice."""
    hidden = trunk(batch.ids, batch.place)
    said = torch.zeros_like(batch.ids, dtype=torch.bool)
    said.view(-1)[batch.said] = choices(trunk, hidden, batch.said) == batch.labels
    return trunk.model.embed_tokens(batch.ids), hidden, said


def logits_at(trunk: Network, hidden: Tensor, places: Tensor) -> Tensor:
    return trunk.logits(hidden.flatten(0, 1)[places])


def choices(trunk: Network, hidden: Tensor, places: Tensor) -> Tensor:
    return logits_at(trunk, hidden, places).argmax(-1)


def chains(said: Tensor) -> list[Tensor]:
    """For each draft, the rows at whose place it can be made: all tokens from the chain's first on are said."""
    found, row = [], said
    for _ in WEIGHTS:
        row = said & F.pad(row, (1, -1))
        found.append(row)
    return found


def mean_loss(trunk: Network, head: Head, batch: Batch) -> Tensor:
    """How unlikely the drafts find what the model says, weighted, over all that is said."""
    embedded, hidden, said = read(trunk, batch)
    total = torch.zeros((), device=batch.ids.device)
    for weight, output, rows in zip(WEIGHTS, head(embedded, hidden, batch.place), chains(said), strict=True):
        losses = F.cross_entropy(logits_at(trunk, output, batch.said), batch.labels, reduction="none")
        total = total + weight * (losses * rows.flatten()[batch.said]).sum()
    return total / len(batch.labels)


@torch.no_grad()
def hits(trunk: Network, head: Head, batch: Batch) -> tuple[Tensor, Tensor]:
    """Two of shape [drafts, rows, width]: whether a column's chain has room for this draft, and whether it is right."""
    embedded, hidden, said = read(trunk, batch)
    room, right = [], []
    for back, (output, rows) in enumerate(zip(head(embedded, hidden, batch.place), chains(said), strict=True)):
        hit = torch.zeros_like(said)
        hit.view(-1)[batch.said] = choices(trunk, output, batch.said) == batch.labels
        room.append(F.pad(rows, (-back, back)))
        right.append(F.pad(rows & hit, (-back, back)))
    return torch.stack(room), torch.stack(right)


def rounds(accepted: list[int], room: list[bool]) -> int:
    """How many rounds of drafting a row of conversation takes when each round accepts what its chain would."""
    at = count = 0
    while at < len(accepted):
        count += room[at]
        at += 1 + accepted[at]
    return count


def acceptance(trunk: Network, head: Head, batches: list[Batch]) -> str:
    """How often drafts are what the model says, wherever its first choice is the conversation's text.

    Of each draft alone, and after right ones in the same chain; and the tokens that a round of drafting yields, on
    average over all places, and over the rounds of generating the turns in order, which short turns cut off.
    """
    device = trunk.model.norm.weight.device
    made, right, whole, kept = (torch.zeros(len(WEIGHTS), device=device) for _ in range(4))
    tokens = taken = 0
    for batch in batches:
        room, hit = hits(trunk, head, batch.to(device))
        leading = hit.cumprod(0)
        made += room.sum((1, 2))
        right += hit.sum((1, 2))
        whole += room[-1].sum()
        kept += (leading * room[-1]).sum((1, 2))
        tokens += int(room[0].sum())
        taken += sum(map(rounds, leading.sum(0).tolist(), room[0].tolist()))
    alone = " ".join(f"{share:.3f}" for share in (right / made).tolist())
    chained = " ".join(f"{share:.3f}" for share in (kept / torch.cat([whole[:1], kept[:-1]])).tolist())
    expected = 1 + (kept / whole).sum().item()
    return f"alone {alone}  chained {chained}  tokens a round {expected:.3f}, in turns {tokens / taken:.3f}"


def heldout_batches(folder: Path, per_category: int) -> list[Batch]:
    """Conversations whose phrasings training never uses."""
    return whole(Tokenizer.from_file(str(folder / "tokenizer.json")), heldout_set(0, per_category))


def main() -> None:
    parser = options("Train the tiny model's draft head.")
    parser.set_defaults(steps=1500)
    parser.add_argument("--per-category", type=int, default=30, help="conversations of a category to measure on")
    parser.add_argument("--start", type=Path, help="begin with the head of this folder")
    args = parser.parse_args()
    if not (args.out / "model.safetensors").is_file():
        parser.error(f"--out: {args.out} holds no model.safetensors; train the model into it with train.py first")
    device = prepare(args.seed)
    trunk = load_model(args.out).to(device).eval().requires_grad_(False)
    head = Head()
    if args.start:
        load_head(head, args.start)
    head = head.to(device)
    compiled(trunk.model.layers, device)
    compiled(head.layers, device)
    print(f"{sum(p.numel() for p in head.parameters())} parameters, {device}", flush=True)

    def report() -> str:
        save_head(head, args.out)
        return ""

    train(head, partial(mean_loss, trunk, head), conversations(args), args, report)
    save_head(head, args.out)
    if args.per_category:
        measured(args.out, args.per_category)


def measured(folder: Path, per_category: int) -> None:
    """Print how often the saved head is right."""
    trunk, head = load_model(folder).eval(), Head()
    load_head(head, folder)
    print(f"held-out: {acceptance(trunk, head, heldout_batches(folder, per_category))}", flush=True)
    for file in ("fresh", "fresh2"):
        evaluate_on(file)
        print(f"{file}: {acceptance(trunk, head, heldout_batches(folder, per_category))}", flush=True)


if __name__ == "__main__":
    main()
