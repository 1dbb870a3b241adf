"""Text from a model: samplers and decoding with a KV cache."""
