"""Words in, words out: templates, tokens, streams and tool calls. Knows no engine and no tensors."""
