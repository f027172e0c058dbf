"""From an encoder to a directory that TVM's runtime runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deltic.embeddings.compiled_files import encoder_parameters, write_encoder_config, write_encoder_files
from deltic.embeddings.directory import StoredEncoder
from deltic.export.extras import need
from deltic.export.tvm import parameters
from deltic.export.tvm.compiler import Compiled, Stored, build_library, quantization
from deltic.export.tvm.metadata import Metadata
from deltic.export.tvm.targets import find_goal


def compile_encoder(stored: StoredEncoder, folder: Path, *, dtype: Stored = "float32", target: str = "llvm"
                    ) -> Compiled:
    """Compile an encoder of the BERT family into a directory, which must exist. dtype: of the matrices and the table of
    words. The files that say how vectors are made of its states go along."""
    need("tvm")
    goal, config = find_goal(target), stored.config
    stored.texts(min(stored.recipe.max_length or config.max_length, config.max_length))  # refuse a lacking tokenizer
    write_encoder_files(stored, folder)
    from deltic.embeddings.compiled_network import EncoderNetwork, specification  # needs the compiler

    metadata = Metadata("v2", config.family, quantization(dtype), (), config.max_length, config.max_length,
                        config.vocab_size, goal.machine, goal.needs, device=goal.device, system=goal.system,
                        target=goal.text)
    library, taken = build_library(lambda: EncoderNetwork(config, dtype), lambda _: specification(), metadata, goal,
                                   folder)
    size = parameters.write(folder, "v2", encoder_parameters(stored, taken.parameters))
    write_encoder_config(folder, taken, stored)
    return Compiled(library, size)


def encoder_bytes(stored: StoredEncoder, dtype: Stored) -> int:
    """As `parameter_bytes`, of an encoder."""
    count = sum(int(np.prod(source.shape)) for source in stored.sources.values())
    return count * (2 if dtype == "float16" else 4)
