"""Converts texts to vectors and scores: encoders of the BERT family, and decoders that embed or rerank."""
