"""Embeddings and documents."""
