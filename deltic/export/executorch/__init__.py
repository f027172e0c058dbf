"""ExecuTorch: models as one .pte file, for phones and programs without Python. The extra `deltic[executorch]`."""
