"""Quantized weights on a GPU: tiles of 8 rows and 256 columns, packed from blocks.

Packing is exact: a tile has the codes and scales of its blocks in another order (kernels/packed.cuh). Lane l of a warp
reads two sets of 32 columns of row l // 4: from column l % 4 * 32 on, and from 128 columns further on. The blocks of
float8 are described in loader/formats/fp8.py, the blocks of NVFP4 and INT4 in loader/four_bits.py. All others are
GGUF's. Tests also pack tiles on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from deltic.ops.quantized import PackedForm, QTensor, read_from

TILE_ROWS, TILE_COLUMNS = 8, 256
"""Rows and columns of a tile."""
WEIGHTS_PER_PIECE: Final = 1 << 24
"""Number of weights that are packed at once. It limits the memory for loading."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A tile format: its number and bytes per tile, as in kernels/packed.cuh. row: bytes of a tile's row in a file."""

    number: int
    nbytes: int
    row: int


KINDS: Final[Mapping[str, Kind]] = {
    "Q8_0": Kind(0, 2176, 272), "Q4_K": Kind(1, 1184, 144), "Q6_K": Kind(2, 1680, 210), "Q5_K": Kind(3, 1696, 176),
    "BF16": Kind(4, 4096, 512), "FP8": Kind(5, 2112, 264), "MXFP4": Kind(6, 1088, 136), "NVFP4": Kind(7, 1184, 148),
    "INT4_128": Kind(8, 1088, 136), "INT4_64": Kind(9, 1152, 144), "INT4_32": Kind(10, 1280, 160)}
PLAIN_KINDS: Final = frozenset({"BF16", "FP8"})
"""Formats that are multiplied with bfloat16 inputs. Others are multiplied with inputs quantized to integers."""
_AS_BYTES: Final = ("Q4_0", "Q5_0", "IQ4_NL")
"""Types that become Q8_0 without loss, because their codes are a subset of Q8_0's codes."""
PACKED_FORMATS: Final = frozenset({*KINDS, *_AS_BYTES}) - {"BF16"}
"""Types of matrices that can stay packed."""
_IQ4_NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def tiles_form(device: str | torch.device) -> PackedForm:
    """Returns the form of weights on a GPU."""
    return PackedForm(partial(pack_tiles, device=device), serves, torch.bfloat16, torch.device(device),
                partial(pack_stack, device=device))


def serves(type: str, columns: int) -> bool:
    """True if a matrix of this type and width can stay packed."""
    return columns % TILE_COLUMNS == 0 and type in PACKED_FORMATS


def packed_bytes(type: str, rows: int, columns: int) -> int | None:
    """Returns the bytes of a packed matrix; None if it cannot stay packed."""
    if not serves(type, columns):
        return None
    kind = KINDS["Q8_0" if type in _AS_BYTES else type]
    return -(-rows // TILE_ROWS) * (columns // TILE_COLUMNS) * kind.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Tiles(QTensor):
    """A matrix of tiles on a GPU. type: a name in KINDS. data [units of 8 rows, bytes] uint8: the last unit is padded
    with zero rows. matrix: None."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.type]

    def lookup(self, ids: Tensor) -> Tensor:
        return _numbers(self.type, self.data[ids // TILE_ROWS], self.columns)[
            torch.arange(len(ids), device=ids.device), ids % TILE_ROWS]

    def dequantize(self) -> Tensor:
        return _numbers(self.type, self.data, self.columns).flatten(0, 1)[:self.rows]

    def room_for(self, rows: int) -> Tiles:
        return replace(self, rows=rows, data=self.data.new_zeros(-(-rows // TILE_ROWS), self.data.shape[1]))

    def put(self, places: Tensor, source: QTensor, rows: Tensor) -> None:
        own = _bytes_of_rows(self.type, self.data.device)
        to, of = (matrix.data.unflatten(1, (-1, self.kind.nbytes)) for matrix in (self, source))
        tiles = torch.arange(to.shape[1], device=self.data.device)[:, None]
        to[(places // TILE_ROWS)[:, None, None], tiles, own[places % TILE_ROWS][:, None]] = of[
            (rows // TILE_ROWS)[:, None, None], tiles, own[rows % TILE_ROWS][:, None]]

    def row_view(self, first: int, end: int) -> Tiles:
        assert first % TILE_ROWS == 0 and (end % TILE_ROWS == 0 or end == self.rows)
        return replace(self, rows=end - first, data=self.data[first // TILE_ROWS:-(-end // TILE_ROWS)])

    def halves(self) -> tuple[Tiles, Tiles]:
        """Returns the upper and the lower half of the rows. Both must consist of whole units."""
        one, other = self.data.chunk(2)
        return replace(self, rows=self.rows // 2, data=one), replace(self, rows=self.rows // 2, data=other)

    def joined(self, other: QTensor) -> QTensor | None:
        if not isinstance(other, Tiles) or self.type != other.type or self.rows % TILE_ROWS:
            return None
        return replace(self, rows=self.rows + other.rows, data=torch.cat((self.data, other.data)))


def pack_tiles(type: str, number: int, rows: int, columns: int, row_bytes: int, read: Callable[[int, int], Any],
               device: str | torch.device) -> Tiles:
    """Packs like `quantized.pack_rows`, on `device`. type: a type that `serves` accepts, or BF16."""
    del number
    kind = "Q8_0" if type in _AS_BYTES else type
    units = -(-rows // TILE_ROWS)
    data = torch.empty(units, columns // TILE_COLUMNS * KINDS[kind].nbytes, dtype=torch.uint8, device=device)
    step = max(TILE_ROWS, WEIGHTS_PER_PIECE // columns // TILE_ROWS * TILE_ROWS)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = torch.as_tensor(read(first * row_bytes, count * row_bytes)).to(device).view(count, row_bytes)
        if count % TILE_ROWS:
            raw = torch.cat((raw, raw.new_zeros(-count % TILE_ROWS, row_bytes)))
        tiles = _PACK[kind](_as_bytes(type, raw) if type in _AS_BYTES else raw)
        data[first // TILE_ROWS:first // TILE_ROWS + len(tiles)] = tiles
    return Tiles(kind, rows, columns, data, None)


def pack_stack(type: str, number: int, count: int, rows: int, columns: int, row_bytes: int,
               read: Callable[[int, int], Any], device: str | torch.device) -> tuple[Tiles, ...]:
    """Packs `count` consecutive matrices [rows, columns], as views of one tensor if their rows fill whole units."""
    if rows % TILE_ROWS:
        size = rows * row_bytes
        return tuple(pack_tiles(type, number, rows, columns, row_bytes, partial(read_from, read, index * size), device)
                     for index in range(count))
    whole = pack_tiles(type, number, count * rows, columns, row_bytes, read, device)
    return tuple(replace(whole, rows=rows, data=data) for data in whole.data.chunk(count))


@cache
def _bytes_of_rows(type: str, device: torch.device) -> Tensor:
    """Returns the indices of the bytes of a tile that belong to each of its rows, int64 [8, bytes / 8]."""
    rows = (255 * torch.eye(TILE_ROWS, dtype=torch.uint8)).flatten()[:, None].expand(-1, KINDS[type].row).contiguous()
    changed = _PACK[type](rows) != _PACK[type](torch.zeros_like(rows))
    return changed.nonzero()[:, 1].view(TILE_ROWS, -1).to(device)


def tiles_of(weight: Tensor) -> Tiles:
    """Converts a bfloat16 matrix to tiles."""
    raw = weight.contiguous().view(torch.uint8)
    rows, width = raw.shape
    return pack_tiles("BF16", 0, rows, width // 2, width, lambda start, count: raw.view(-1)[start:start + count],
                      weight.device)


def _lanes(codes: Tensor) -> Tensor:
    """Orders codes by lanes: [rows, columns] -> [units, tiles, 8 rows, 4 lanes, 2 sets, 8, 4 columns]."""
    columns = codes.view(-1, TILE_ROWS, codes.shape[1] // TILE_COLUMNS, 2, 4, 8, 4)
    found: Tensor = columns.permute(0, 2, 1, 4, 3, 5, 6)
    return found


def _unlanes(lanes: Tensor) -> Tensor:
    """Restores the order of columns: [units, tiles, 8 rows, 4 lanes, 2 sets, ...] -> [units, tiles, 8 rows, 8, ...]."""
    return lanes.transpose(3, 4).flatten(3, 4)


def _join(parts: list[Tensor]) -> Tensor:
    """Joins parts of tiles [units, tiles, ...] of any dtype to bytes [units, tiles * bytes]."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten(2) for part in parts], 2).flatten(1)


def _scales(values: Tensor) -> Tensor:
    """Orders scales by tiles: [rows, tiles, n] -> [units, tiles, 8, n]."""
    return values.view(-1, TILE_ROWS, *values.shape[1:]).transpose(1, 2)


def _lane_scales(values: Tensor) -> Tensor:
    """Orders scales of groups of at most 32 columns by lanes: [rows, tiles, n] -> [units, tiles, 8, 4 lanes, n / 4]."""
    groups = _scales(values).unflatten(-1, (2, 4, -1))
    found: Tensor = groups.transpose(3, 4).flatten(4)
    return found


def _group_scales(data: Tensor) -> Tensor:
    """Inverts the lane order of `_lane_scales`: [units, tiles, 8, 4 lanes, n / 4] -> [units, tiles, 8, n]."""
    found: Tensor = data.unflatten(-1, (2, -1)).transpose(3, 4).flatten(3)
    return found


def _words(words: Tensor) -> Tensor:
    """Reorders the lanes' words [units, tiles, rows, 4 lanes, n], so that a lane reads four words at once."""
    found: Tensor = words.unflatten(-1, (-1, 4)).permute(0, 1, 4, 2, 3, 5)
    return found


def _unwords(data: Tensor, count: int) -> Tensor:
    """Inverts `_words`: bytes [units, tiles, bytes] -> int32 [units, tiles, 8, 4, count]."""
    words = data[..., :128 * count].contiguous().view(torch.int32)
    found: Tensor = words.unflatten(-1, (count // 4, TILE_ROWS, 4, 4)).permute(0, 1, 3, 4, 2, 5).flatten(4)
    return found


# Q8_0

def _as_bytes(type: str, raw: Tensor) -> Tensor:
    """Converts blocks of Q4_0, Q5_0 or IQ4_NL [rows, bytes] to blocks of Q8_0."""
    blocks = raw.unflatten(1, (-1, 22 if type == "Q5_0" else 18))
    low, high = blocks[..., -16:] & 15, blocks[..., -16:] >> 4
    codes = torch.cat((low, high), -1).to(torch.int16)
    if type == "IQ4_NL":
        codes = torch.tensor(_IQ4_NL, dtype=torch.int16, device=raw.device)[codes.long()]
    elif type == "Q4_0":
        codes = codes - 8
    else:
        bits = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device) & 1
        codes = (codes | bits.flatten(-2).to(torch.int16) << 4) - 16
    return torch.cat((blocks[..., :2], codes.to(torch.int8).view(torch.uint8)), -1).flatten(1)


def _pack_q8_0(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 34))
    scales = blocks[..., :2].contiguous().view(torch.int16).view(len(raw), -1, 8)
    return _join([_words(_int32(_lanes(blocks[..., 2:].reshape(len(raw), -1)))), _lane_scales(scales)])


def _q8_0(data: Tensor) -> Tensor:
    codes = _unlanes(_bytes(_unwords(data, 16)).view(torch.int8).unflatten(4, (2, 8)))
    return _scaled(codes, _group_scales(_halves(data[..., 2048:]).unflatten(-1, (TILE_ROWS, 4, 2))))


def _int32(bytes: Tensor) -> Tensor:
    """Views uint8 [units, tiles, rows, lanes, ..., 4] as int32 words [units, tiles, rows, lanes, n]."""
    found: Tensor = bytes.contiguous().view(torch.int32).flatten(4)
    return found


def _bytes(words: Tensor) -> Tensor:
    """Inverts `_int32`. Returns uint8 [units, tiles, rows, lanes, n, 4]."""
    found: Tensor = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return found


# Types with blocks of 256 columns


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks eight scales and minima from 12 bytes (loader/gguf/blocks)."""
    scales, minima, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    return (torch.cat((scales & 63, low & 15 | scales >> 6 << 4), -1),
            torch.cat((minima & 63, low >> 4 | minima >> 6 << 4), -1))


def _fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Unpacks fields of 1, 2 or 4 bits: [..., bytes] -> [..., bytes * 8 / bits]. For each run of `run` bytes, the
    fields in the lowest bits of all its bytes come first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    found: Tensor = (packed.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)
    return found


def _affine(blocks: Tensor) -> list[Tensor]:
    """Returns the scales of Q4_K and Q5_K tiles."""
    both = torch.cat([_lane_scales(values) for values in _six_bits(blocks[..., 4:16])], -1)
    return [both, _scales(blocks[..., :4])]


def _pack_q4_k(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 144))
    low, high = _lanes(_fields(blocks[..., 16:], 4, 32).flatten(1)).unbind(4)
    return _join([_words(_int32(low | high << 4)), *_affine(blocks)])


def _q4_k(data: Tensor) -> Tensor:
    codes = _bytes(_unwords(data, 8))
    return _affinely(_unlanes(torch.stack((codes & 15, codes >> 4), 4)), data[..., 1024:])


def _six_bit_words(codes: Tensor) -> Tensor:
    """Packs codes of up to six bits [rows, columns]: three words per 16 codes of a lane."""
    *first, last = _lanes(codes).unflatten(5, (2, 4)).unbind(6)
    return _words(_int32(torch.stack([code << 2 | last >> 4 - 2 * index & 3 for index, code in enumerate(first)], 6)))


def _six_bit_codes(data: Tensor) -> Tensor:
    """Inverts `_six_bit_words`. Returns codes [units, tiles, rows, 8 groups, 32]."""
    found = _bytes(_unwords(data, 12)).unflatten(4, (2, 2, 3))
    x, y, z = (found & 3).unbind(6)
    codes = torch.cat((found >> 2, (x << 4 | y << 2 | z).unsqueeze(6)), 6)
    return _unlanes(codes.flatten(5))


def _pack_q5_k(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 176))
    codes = _fields(blocks[..., 48:], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4
    return _join([_six_bit_words(codes.flatten(1)), *_affine(blocks)])


def _q5_k(data: Tensor) -> Tensor:
    return _affinely(_six_bit_codes(data), data[..., 1536:])


def _pack_q6_k(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 210))
    codes = _fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4
    scales = _lane_scales(blocks[..., 192:208] ^ 128)
    return _join([_six_bit_words(codes.flatten(1) ^ 32), scales, _scales(blocks[..., 208:])])


def _q6_k(data: Tensor) -> Tensor:
    own = _group_scales(data[..., 1536:1664].unflatten(-1, (TILE_ROWS, 4, 4)))
    scales = (own.float() - 128) * _halves(data[..., 1664:])[..., None]
    return _scaled((_six_bit_codes(data) ^ 32).to(torch.int8) - 32, scales, 16)


def _pack_bf16(raw: Tensor) -> Tensor:
    groups = raw.view(torch.int16).view(-1, TILE_ROWS, raw.shape[1] // 2 // TILE_COLUMNS, 8, 32)
    return _join([groups.permute(0, 2, 3, 1, 4)])


def _bf16(data: Tensor) -> Tensor:
    groups = data.contiguous().view(torch.bfloat16).unflatten(-1, (8, TILE_ROWS, 32))
    found: Tensor = groups.transpose(2, 3).float()
    return found


_PAIRS: Final = (2, 0, 3, 1)
"""Order of four columns in the bytes of a word. The kernels take the upper two bytes, then the lower two."""


def _pack_fp8(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 132))
    lanes = blocks[..., 4:].reshape(-1, TILE_ROWS, blocks.shape[1] // 2, 2, 4, 4, 2, 4)[..., _PAIRS]
    codes = lanes.permute(0, 2, 4, 1, 5, 3, 6, 7)  # per lane: group j, then group j + 4
    scales = blocks[..., :4].contiguous().view(torch.float32).view(len(raw), -1, 2)
    return _join([codes, _scales(scales)])


def _fp8(data: Tensor) -> Tensor:
    lanes = data[..., :2048].unflatten(-1, (4, TILE_ROWS, 4, 2, 2, 4))[..., (1, 3, 0, 2)]
    codes = lanes.permute(0, 1, 3, 5, 2, 4, 6, 7).contiguous().view(torch.float8_e4m3fn)
    return _scaled(codes, data[..., 2048:].contiguous().view(torch.float32).unflatten(-1, (TILE_ROWS, 2)), 128)


# 4 bits: codes of neighbouring columns in a byte

_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the 16 codes of E2M1, doubled."""


def _pairs(packed: Tensor) -> Tensor:
    """Unpacks codes of neighbouring columns: [rows, tiles, 128] -> [rows, columns]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _float_words(codes: Tensor) -> Tensor:
    """Packs codes [rows, columns]. A word has four codes of a lane's set 0, then four of its set 1."""
    lanes = _lanes(codes)
    both = (lanes[..., ::2] | lanes[..., 1::2] << 4).transpose(4, 5)
    return _words(_int32(both.flatten(5)))


def _float_codes(data: Tensor) -> Tensor:
    """Inverts `_float_words`. Returns doubled values [units, tiles, rows, 8 groups, 32]."""
    both = _bytes(_unwords(data, 8)).unflatten(-1, (2, 2)).transpose(4, 5)
    codes = _unlanes(torch.stack((both & 15, both >> 4), -1).flatten(5))
    return torch.tensor(_E2M1, dtype=torch.float32, device=data.device)[codes.int()]


def _pack_mxfp4(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 17))
    exponents = blocks[..., 0].reshape(len(raw), -1, 8)
    return _join([_float_words(_fields(blocks[..., 1:], 4, 16).flatten(1)), _lane_scales(exponents)])


def _mxfp4(data: Tensor) -> Tensor:
    exponents = _group_scales(data[..., 1024:].unflatten(-1, (TILE_ROWS, 4, 2))).int()
    # 2^(e - 128), including subnormal numbers
    halved = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)
    return _scaled(_float_codes(data), halved.view(torch.float32))


def _pack_nvfp4(raw: Tensor) -> Tensor:
    blocks = raw.unflatten(1, (-1, 148))
    return _join([_float_words(_pairs(blocks[..., 20:])), _lane_scales(blocks[..., 4:20]), _scales(blocks[..., :4])])


def _nvfp4(data: Tensor) -> Tensor:
    own = _group_scales(data[..., 1024:1152].unflatten(-1, (TILE_ROWS, 4, 4)))
    factors = data[..., 1152:].contiguous().view(torch.float32)[..., None]
    return _scaled(_float_codes(data), own.contiguous().view(torch.float8_e4m3fn).float() * 2.0**-8 * factors, 16)


def _pack_int4(raw: Tensor, groups: int) -> Tensor:
    blocks = raw.unflatten(1, (-1, 4 * groups + 128))
    low, high = _lanes(_pairs(blocks[..., 4 * groups:])).unbind(4)
    return _join([_words(_int32(low | high << 4)), _scales(blocks[..., :4 * groups])])


def _int4(data: Tensor, groups: int) -> Tensor:
    codes = _bytes(_unwords(data, 8))
    words = data[..., 1024:].contiguous().view(torch.int32).unflatten(-1, (TILE_ROWS, groups))
    numbers = _unlanes(torch.stack((codes & 15, codes >> 4), 4)).float().flatten(3).unflatten(3, (groups, -1))
    found: Tensor = (numbers - (words & 255)[..., None]) * (words & ~255).view(torch.float32)[..., None]
    return found


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


def _scaled(codes: Tensor, scales: Tensor, group: int = 32) -> Tensor:
    """Multiplies codes [units, tiles, rows, ...] with scales [units, tiles, rows, 256 / group]."""
    found: Tensor = codes.float().flatten(3).unflatten(3, (-1, group)) * scales[..., None]
    return found


def _affinely(codes: Tensor, scales: Tensor) -> Tensor:
    both = scales[..., :128].float().unflatten(-1, (TILE_ROWS, 4, 4)).chunk(2, -1)
    factor, minimum = map(_group_scales, both)
    units = _halves(scales[..., 128:]).unflatten(-1, (TILE_ROWS, 2))
    found: Tensor = _scaled(codes, factor * units[..., :1]) - (minimum * units[..., 1:])[..., None]
    return found


def _numbers(type: str, data: Tensor, columns: int) -> Tensor:
    """Dequantizes units [n, bytes] to float32 [n, 8, columns]."""
    tiles = _UNPACK[type](data.unflatten(1, (columns // TILE_COLUMNS, -1)))
    return tiles.flatten(3).transpose(1, 2).flatten(2)


_PACK: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q8_0": _pack_q8_0, "Q4_K": _pack_q4_k, "Q6_K": _pack_q6_k, "Q5_K": _pack_q5_k, "BF16": _pack_bf16,
    "FP8": _pack_fp8, "MXFP4": _pack_mxfp4, "NVFP4": _pack_nvfp4,
    **{f"INT4_{256 // groups}": partial(_pack_int4, groups=groups) for groups in (2, 4, 8)}}
_UNPACK: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k, "Q5_K": _q5_k, "BF16": _bf16, "FP8": _fp8,
    "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    **{f"INT4_{256 // groups}": partial(_int4, groups=groups) for groups in (2, 4, 8)}}
