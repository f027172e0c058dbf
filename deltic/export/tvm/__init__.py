"""Directories that TVM has compiled, and how they are made (apache-tvm) and run (its runtime alone)."""
