"""GGUF files: reading, writing, block types, and the mapping of their names and keys."""
