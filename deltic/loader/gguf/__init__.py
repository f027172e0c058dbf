"""GGUF files: reading them, their block types, and what their names and keys mean for our models."""
