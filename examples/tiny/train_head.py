"""Train the tiny model's draft head, which guesses the tokens after the next one, on the finished model.

python examples/tiny/train_head.py --out deltic/models/tiny

Row i of the head reads token i and the model's last hidden state of position i - 1, and guesses token i + 1.
A further draft reads the token just guessed and the head's own output in place of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from data import heldout_set
from model import load_head, save_head
from phrases import evaluate_on_fresh
from torch import Tensor, nn
from train import Batch, Steps, conversations, options, prepare, train
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

WEIGHTS = (1.0, 0.7, 0.5)  # of the losses of the first, second and third draft


class Head(nn.Module):
    """The head, its modules named as Qwen3.5's checkpoints name the tensors below `mtp.`."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        norm = partial(Qwen3_5RMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, embedded: Tensor, hidden: Tensor) -> list[Tensor]:
        """The head's outputs of every row as first, second and third draft.

        `embedded` [batch, width, hidden]: the embeddings of the tokens; `hidden`, of that shape: the model's hidden
        states after its last norm. Row i of draft d is the end of a chain that began at row i - d + 1.
        """
        width = embedded.shape[1]
        rotary = self.rotary(embedded, torch.arange(width, device=embedded.device).expand(3, 1, width))
        cache, outputs = DynamicCache(), []
        for seen in masks(width, len(WEIGHTS), embedded.device):
            before = F.pad(hidden, (0, 0, 1, -1))
            x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1))
            x = self.layers[0](x, position_embeddings=rotary, attention_mask=seen, past_key_values=cache)
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs


def masks(width: int, drafts: int, device: torch.device) -> Iterator[Tensor]:
    """Which rows the rows of each draft attend to: [1, 1, width, width * draft] over those of drafts 1 to `draft`.

    When a chain begins, the rows up to its own are made from the model's hidden states, and each draft adds one.
    """
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    for draft in range(drafts):
        chain = [causal.tril(-back).triu(-back) for back in reversed(range(draft))]
        yield torch.cat([causal.tril(-draft), *chain], 1)[None, None]


@torch.no_grad()
def read(trunk: Qwen3_5ForCausalLM, inputs: Tensor, places: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings and hidden states of a part, and where the next token is said and is the model's first choice."""
    hidden = trunk.model(input_ids=inputs, use_cache=False).last_hidden_state
    said = torch.zeros_like(inputs, dtype=torch.bool)
    said.view(-1)[places] = choices(trunk, hidden, places) == labels
    return trunk.model.embed_tokens(inputs), hidden, said


def logits_at(trunk: Qwen3_5ForCausalLM, hidden: Tensor, places: Tensor) -> Tensor:
    return F.linear(hidden.flatten(0, 1)[places], trunk.lm_head.weight)


def choices(trunk: Qwen3_5ForCausalLM, hidden: Tensor, places: Tensor) -> Tensor:
    return logits_at(trunk, hidden, places).argmax(-1)


def chains(said: Tensor) -> list[Tensor]:
    """For each draft, the rows at whose place it can be made: all tokens from the chain's first on are said."""
    found, row = [], said
    for _ in WEIGHTS:
        row = said & F.pad(row, (1, -1))
        found.append(row)
    return found


def part_loss(trunk: Qwen3_5ForCausalLM, head: Head, inputs: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of one part: how unlikely the drafts find what the model says."""
    embedded, hidden, said = read(trunk, inputs, places, labels)
    total = torch.zeros((), device=inputs.device)
    for weight, output, rows in zip(WEIGHTS, head(embedded, hidden), chains(said), strict=True):
        losses = F.cross_entropy(logits_at(trunk, output, places), labels, reduction="none")
        total = total + weight * (losses * rows.flatten()[places]).sum()
    return total


@torch.no_grad()
def hits(
    trunk: Qwen3_5ForCausalLM, head: Head, inputs: Tensor, places: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Two of shape [drafts, batch, width]: whether a row's chain has room for this draft, and whether it is right."""
    embedded, hidden, said = read(trunk, inputs, places, labels)
    room, right = [], []
    for back, (output, rows) in enumerate(zip(head(embedded, hidden), chains(said), strict=True)):
        hit = torch.zeros_like(said)
        hit.view(-1)[places] = choices(trunk, output, places) == labels
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


def acceptance(trunk: Qwen3_5ForCausalLM, head: Head, batch: Batch) -> str:
    """How often drafts are what the model says, wherever its first choice is the conversation's text.

    Of each draft alone, and after right ones in the same chain; and the tokens that a round of drafting yields, on
    average over all places, and over the rounds of generating the turns in order, which short turns cut off.
    """
    device = trunk.lm_head.weight.device
    made, right, whole, kept = (torch.zeros(len(WEIGHTS), device=device) for _ in range(4))
    tokens = taken = 0
    for part in batch:
        room, hit = hits(trunk, head, *(t.to(device) for t in part))
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


def heldout_batch(folder: Path, per_category: int, tokens: int) -> Batch:
    """Conversations whose phrasings training never uses."""
    found = heldout_set(0, per_category)
    return Steps(folder, found.__getitem__, 1, len(found), tokens)[0]


def main() -> None:
    parser = options("Train the tiny model's draft head.")
    parser.set_defaults(steps=1750, report=250)
    parser.add_argument("--per-category", type=int, default=30, help="held-out conversations to measure on")
    args = parser.parse_args()
    if not (args.out / "model.safetensors").is_file():
        parser.error(f"--out: {args.out} holds no model.safetensors; train the model into it with train.py first")
    device = prepare(args.seed)
    trunk = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval().requires_grad_(False)
    head = Head(trunk.config).to(device)
    print(f"{sum(p.numel() for p in head.parameters())} parameters, {device}", flush=True)
    heldout = heldout_batch(args.out, args.per_category, args.tokens)
    evaluate_on_fresh()
    fresh = heldout_batch(args.out, args.per_category, args.tokens)
    measure = partial(acceptance, trunk, head, heldout)
    train(head, partial(part_loss, trunk, head), conversations(args), args, measure)
    save_head(head, args.out)
    load_head(head, args.out)
    print(f"held-out, as saved: {measure()}")
    print(f"fresh, as saved: {acceptance(trunk, head, fresh)}")


if __name__ == "__main__":
    main()
