"""The kernels' parameters as structs. The members are those in kernels/*.cuh, by kind: pointers, floats, integers."""

from __future__ import annotations

from ctypes import c_int, c_longlong, c_uint64, c_void_p
from typing import Any

from deltic.ops.cuda.driver import KernelArguments, fields


def _struct_of(name: str, members: list[Any]) -> type[KernelArguments]:
    return type(name, (KernelArguments,), {"_fields_": members})


def _struct(name: str, pointers: str, floats: str = "", integers: str = "") -> type[KernelArguments]:
    return _struct_of(name, fields(pointers, floats, integers))


ProductArgs = _struct("ProductArgs", "weight x scale y", "eps", "tokens rows whole rest group inverse slots")
StageArgs = _struct("StageArgs", "x scale y factors", "eps", "tokens")
PackedArgs = _struct_of("PackedArgs", [
    ("data", c_void_p * 4),
    *fields("x scale y", "eps", "tokens total inverse slots slot parts rounds round sums chunk"),
    *((name, c_int * 4) for name in ("kind", "row", "rows", "whole", "rest", "shift"))])
AddedProductArgs, AddedPackedArgs = (
    _struct_of(f"Added{given.__name__}", [*given._fields_, *fields("terms entries")])
    for given in (ProductArgs, PackedArgs))
ShrinkArgs = _struct("ShrinkArgs", "x scale table entries sums", "eps", "tokens columns stride room")
ExpandArgs = _struct("ExpandArgs", "table entries sums terms", "", "tokens rows stride room")
UnpackArgs = _struct("UnpackArgs", "data y", "", "rows columns")
GdnArgs = _struct(
    "GdnArgs", "proj conv decay dt_bias norm state ring y count starts done source target", "eps",
    "key_heads value_heads stride tiled heads")
VerifyArgs = _struct_of("VerifyArgs", [
    *GdnArgs._fields_,
    *fields("base unit append inputs keys updates decays new_inputs new_keys new_decays core ended")])
OverRingsArgs = _struct_of("OverRingsArgs", [
    *GdnArgs._fields_,
    *fields("base unit append inputs keys updates decays")])
AppendArgs = _struct(
    "AppendArgs", "new_inputs new_keys new_decays inputs keys decays count starts done unit append", "",
    "channels key_size value_heads tokens units")
FoldArgs = _struct(
    "FoldArgs",
    "source_state source_conv state conv inputs keys updates decays state_step conv_step inputs_step keys_step "
    "updates_step decays_step", "", "key_heads value_heads key_dim value_dim channels tiled base done")
HeadEnterArgs = _struct(
    "HeadEnterArgs",
    "ids positions embedding embedded norm_embedding norm_hidden hidden norm slots kept taken frequencies axes "
    "count starts done source x turns last", "eps factor", "size rotary tokens")
HeadKeysArgs = _struct(
    "HeadKeysArgs", "proj key_norm turns last slots keys values count starts done target append pages", "eps",
    "kv_heads stride rotary width size")
AcceptArgs = _struct(
    "AcceptArgs",
    "count ids starts done positions source pages chosen keys temperature next accepted", "",
    "tokens rows drafts width key_width")
AttentionArgs = _struct(
    "AttentionArgs", "proj query_norm key_norm bias turns keys values mixed mass y ended count starts done pages",
    "eps", "heads kv_heads stride rotary width parts")
EnterArgs = _struct(
    "EnterArgs", "ids positions embedding frequencies axes residual turns", "factor", "hidden rotary tokens")
AddNormArgs = _struct("AddNormArgs", "residual delta scale y wide", "eps", "hidden")
GateArgs = _struct("GateArgs", "x y", "", "width")
ResidualNormArgs = _struct("ResidualNormArgs", "x delta scale shift y", "eps", "tokens")
NumbersArgs = _struct("NumbersArgs", "host numbers drawn", "", "count tokens")
CursorsArgs = _struct("CursorsArgs", "numbers drawn", "", "tokens rows width")
RowKeysArgs = _struct("RowKeysArgs", "answers done keys", "", "rows width")
ChoiceArgs = _struct(
    "ChoiceArgs", "logits temperature key ids score bounds token chosen landing", "",
    "vocabulary parts rows first devices")
PromptConvArgs = _struct(
    "PromptConvArgs", "proj conv ring tiles units starts done source chunks", "", "stride channels key_heads")
PromptRingArgs = _struct(
    "PromptRingArgs", "proj ring starts done source target emit_row emit_length emit_slot", "",
    "stride channels row emits")
CopySlotArgs = _struct("CopySlotArgs", "state ring target emit_row emit_slot", "", "state_size ring_size rows")
GatedNormArgs = _struct("GatedNormArgs", "proj core norm y", "eps", "stride channels values token")
PromptHeadsArgs = _struct(
    "PromptHeadsArgs", "proj query_norm key_norm bias turns query keys values store", "eps",
    "heads kv_heads stride rotary token")
PromptGateArgs = _struct("PromptGateArgs", "proj bias own prefix own_mass prefix_mass y", "", "heads size stride token")
GatherInt4Args = _struct("GatherInt4Args", "pool y places", "", "count heads")
DeltaTermsArgs = _struct(
    "DeltaTermsArgs", "proj tiles units decay dt_bias terms gates starts chunks", "",
    "key_heads value_heads stride gate_column tiled")
DeltaScanArgs = _struct(
    "DeltaScanArgs",
    "tiles terms gates state core starts done source target firsts emit_row emit_length emit_slot", "",
    "key_heads value_heads tiled row emits")
ExpertsGateArgs = _struct(
    "ExpertsGateArgs", "x scale logits weights wanted y count starts", "eps", "tokens first group slots shared")
ExpertsDownArgs = _struct(
    "ExpertsDownArgs", "x logits weights y count starts", "", "tokens first slots group shared part adds")
AskHostArgs = _struct(
    "AskHostArgs",
    "x scale logits weights count starts state request answer counts experts shares factors input", "eps",
    "tokens first layer")
AddHostArgs = _struct_of("AddHostArgs", [
    *fields("state answer sums y"), ("limit", c_longlong),
    ("hidden", c_int)])
PackedGateArgs = _struct(
    "PackedGateArgs", "x scale logits gate up wanted y count starts", "eps",
    "tokens first group slots slot wide shared_wide gate_kind up_kind shared_gate_kind shared_up_kind")
PackedDownArgs = _struct(
    "PackedDownArgs", "x logits down y count starts", "", "tokens first slots slot kind shared_kind")
UnpackExpertsArgs = _struct_of("UnpackExpertsArgs", [
    *fields("data y counts"), ("stride", c_longlong),
    ("rows", c_int), ("columns", c_int)])
RouteArgs = _struct("RouteArgs", "logits expert place counts share count starts", "", "tokens stride first own")
GroupArgs = _struct(
    "GroupArgs", "x expert place counts wanted share sorted rows tiles total weight count starts", "",
    "tokens hidden shift")
GroupedArgs = _struct_of("GroupedArgs", [
    ("x", c_uint64 * 16),
    *fields("weights tiles total rows weight y counts"), ("experts", c_longlong),
    ("ahead", c_longlong)])
CombineArgs = _struct("CombineArgs", "x y count starts expert shared logits", "", "tokens hidden each stride")
_ALL_REDUCE = [*fields("x y state report"), ("boxes", c_void_p * 8), ("limit", c_longlong),
               *fields("", "", "cells room rank fences")]
AllReduceArgs = _struct_of("AllReduceArgs", _ALL_REDUCE)
AllReduceNormArgs = _struct_of("AllReduceNormArgs", [*_ALL_REDUCE, *fields("scale normed wide", "eps")])
TurnArgs = _struct_of("TurnArgs", [
    *fields("qkv cos sin"), ("count", c_longlong),
    ("heads", c_int)])
TowerNormArgs = _struct("TowerNormArgs", "x delta scale shift y", "eps", "tokens")
