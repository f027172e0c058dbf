"""What the kernels take, as structs; members as in kernels/*.cuh."""

from __future__ import annotations

from deltic.ops.cuda.driver import Arguments, fields


class Product(Arguments):
    _fields_ = fields("weight x scale y", "eps", "tokens rows whole rest group inverse slots")


class Gdn(Arguments):
    _fields_ = fields("proj conv decay dt_bias norm state ring y count starts done source target", "eps",
                      "key_heads value_heads stride tiled heads")


class Attention(Arguments):
    _fields_ = fields("proj query_norm key_norm turns keys values mixed mass y ended count starts done pages", "eps",
                      "heads kv_heads stride rotary width parts")


class Enter(Arguments):
    _fields_ = fields("ids positions embedding frequencies axes residual turns", "", "hidden rotary tokens")


class AddNorm(Arguments):
    _fields_ = fields("residual delta scale y", "eps", "hidden")


class Gate(Arguments):
    _fields_ = fields("x y", "", "width")


class Choice(Arguments):
    _fields_ = fields("logits temperature key score bounds token chosen", "", "vocabulary parts rows")
