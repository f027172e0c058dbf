"""Converts between messages and token ids: templates, tokens, streams, tool calls. Uses no engine and no tensors."""
