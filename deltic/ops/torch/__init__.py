"""The default backend: the ops vectorised in plain torch, on any device."""

from deltic.ops import Ops, reference
from deltic.ops.torch.attention import attention_mixer, store_kv
from deltic.ops.torch.basic import add_norm, copy, embed, head, mlp, moe, pack, rope
from deltic.ops.torch.encoder import vision
from deltic.ops.torch.gdn import flush_delta_log, gdn_mixer
from deltic.ops.torch.sample import sample

OPS = Ops(pack=pack, embed=embed, rope=rope, add_norm=add_norm, gdn_mixer=gdn_mixer, flush_delta_log=flush_delta_log,
          attention_mixer=attention_mixer, store_kv=store_kv, mlp=mlp, moe=moe, head=head, sample=sample,
          copy_slots=copy, copy_pages=copy, step=reference.step, mtp_step=reference.mtp_step, vision=vision)
