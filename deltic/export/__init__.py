"""Compiled models that the engine serves like any other: directories of TVM, ExecuTorch programs."""
