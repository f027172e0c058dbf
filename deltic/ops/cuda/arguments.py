"""The kernels' parameters as structs; members as in kernels/*.cuh."""

from __future__ import annotations

from ctypes import c_int, c_longlong, c_uint64, c_void_p
from typing import ClassVar

from deltic.ops.cuda.driver import KernelArguments, fields


class ProductArgs(KernelArguments):
    _fields_ = fields("weight x scale y", "eps", "tokens rows whole rest group inverse slots")


class PackedArgs(KernelArguments):
    _fields_: ClassVar = [
        ("data", c_void_p * 4),
        *fields("x scale y", "eps", "tokens total inverse slots slot parts rounds round sums"),
        *((name, c_int * 4) for name in ("kind", "row", "rows", "whole", "rest", "shift"))]


class UnpackArgs(KernelArguments):
    _fields_ = fields("data y", "", "rows columns")


class GdnArgs(KernelArguments):
    _fields_ = fields("proj conv decay dt_bias norm state ring y count starts done source target", "eps",
                      "key_heads value_heads stride tiled heads")


class VerifyArgs(KernelArguments):
    _fields_ = (*GdnArgs._fields_, *fields("base unit append inputs keys updates decays new_inputs new_keys new_decays "
                                       "core ended", "", ""))


class OverRingsArgs(KernelArguments):
    _fields_ = (*GdnArgs._fields_, *fields("base unit append inputs keys updates decays", "", ""))


class AppendArgs(KernelArguments):
    _fields_ = fields("new_inputs new_keys new_decays inputs keys decays count starts done unit append", "",
                      "channels key_size value_heads tokens units")


class FoldArgs(KernelArguments):
    _fields_ = fields("source_state source_conv state conv inputs keys updates decays state_step conv_step inputs_step "
                      "keys_step updates_step decays_step", "",
                      "key_heads value_heads key_dim value_dim channels tiled base done")


class HeadEnterArgs(KernelArguments):
    _fields_ = fields("ids positions embedding embedded norm_embedding norm_hidden hidden norm slots frequencies axes "
                      "count starts done source x turns last", "eps", "size rotary tokens")


class HeadKeysArgs(KernelArguments):
    _fields_ = fields("proj key_norm turns last slots keys values count starts done target append pages", "eps",
                      "kv_heads stride rotary width size")


class AcceptArgs(KernelArguments):
    _fields_ = fields("count ids starts done positions source pages chosen keys temperature last slots next accepted",
                      "", "tokens rows drafts width size key_width")


class AttentionArgs(KernelArguments):
    _fields_ = fields("proj query_norm key_norm turns keys values mixed mass y ended count starts done pages", "eps",
                      "heads kv_heads stride rotary width parts")


class EnterArgs(KernelArguments):
    _fields_ = fields("ids positions embedding frequencies axes residual turns", "", "hidden rotary tokens")


class AddNormArgs(KernelArguments):
    _fields_ = fields("residual delta scale y wide", "eps", "hidden")


class GateArgs(KernelArguments):
    _fields_ = fields("x y", "", "width")


class ResidualNormArgs(KernelArguments):
    _fields_ = fields("x delta scale shift y", "eps", "tokens")


class NumbersArgs(KernelArguments):
    _fields_ = fields("host numbers drawn", "", "count tokens")


class CursorsArgs(KernelArguments):
    _fields_ = fields("numbers drawn", "", "tokens rows width")


class RowKeysArgs(KernelArguments):
    _fields_ = fields("answers done keys", "", "rows width")


class ChoiceArgs(KernelArguments):
    _fields_ = fields("logits temperature key ids score bounds token chosen landing", "", "vocabulary parts rows")


class PromptConvArgs(KernelArguments):
    _fields_ = fields("proj conv ring tiles units starts done source chunks", "", "stride channels key_heads")


class PromptRingArgs(KernelArguments):
    _fields_ = fields("proj ring starts done source target emit_row emit_length emit_slot", "",
                      "stride channels row emits")


class CopySlotArgs(KernelArguments):
    _fields_ = fields("state ring target emit_row emit_slot", "", "state_size ring_size rows")


class GatedNormArgs(KernelArguments):
    _fields_ = fields("proj core norm y", "eps", "stride channels values token")


class PromptHeadsArgs(KernelArguments):
    _fields_ = fields("proj query_norm key_norm turns query keys values store", "eps",
                      "heads kv_heads stride rotary token")


class PromptGateArgs(KernelArguments):
    _fields_ = fields("proj own prefix own_mass prefix_mass y", "", "heads size stride token")


class DeltaTermsArgs(KernelArguments):
    _fields_ = fields("proj tiles units decay dt_bias terms gates starts chunks", "",
                      "key_heads value_heads stride gate_column tiled")


class DeltaScanArgs(KernelArguments):
    _fields_ = fields("tiles terms gates state core starts done source target firsts emit_row emit_length emit_slot",
                      "", "key_heads value_heads tiled row emits")


class ExpertsGateArgs(KernelArguments):
    _fields_ = fields("x scale logits weights wanted y count starts", "eps", "tokens first group slots")


class ExpertsDownArgs(KernelArguments):
    _fields_ = fields("x logits weights y count starts", "", "tokens first slots")


class AskHostArgs(KernelArguments):
    _fields_ = fields("x scale logits weights count starts state request answer counts experts shares factors input",
                      "eps", "tokens first layer")


class AddHostArgs(KernelArguments):
    _fields_: ClassVar = [*fields("state answer sums y", "", ""), ("limit", c_longlong), ("hidden", c_int)]


class PackedGateArgs(KernelArguments):
    _fields_ = fields("x scale logits gate up wanted y count starts", "eps",
                      "tokens first group slots slot wide shared_wide gate_kind up_kind shared_gate_kind "
                      "shared_up_kind")


class PackedDownArgs(KernelArguments):
    _fields_ = fields("x logits down y count starts", "", "tokens first slots slot kind shared_kind")


class UnpackExpertsArgs(KernelArguments):
    _fields_: ClassVar = [*fields("data y counts", "", ""), ("stride", c_longlong), ("rows", c_int), ("columns", c_int)]


class RouteArgs(KernelArguments):
    _fields_ = fields("logits expert place counts share count starts", "", "tokens stride")


class GroupArgs(KernelArguments):
    _fields_ = fields("x expert place counts wanted share sorted rows tiles total weight count starts", "",
                      "tokens hidden shift")


class GroupedArgs(KernelArguments):
    _fields_: ClassVar = [("x", c_uint64 * 16), *fields("weights tiles total rows weight y counts", "", ""),
                          ("experts", c_longlong), ("ahead", c_longlong)]


class CombineArgs(KernelArguments):
    _fields_ = fields("x y count starts", "", "tokens hidden each")


class TurnArgs(KernelArguments):
    _fields_: ClassVar = [*fields("qkv cos sin", "", ""), ("count", c_longlong), ("heads", c_int)]


class TowerNormArgs(KernelArguments):
    _fields_ = fields("x delta scale shift y", "eps", "tokens")
