"""Vectors of texts and scores of documents over HTTP."""
