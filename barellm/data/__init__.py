"""Text to tokens, tokens to batches: tokenizers, text sources, shards and the loader. Imports nothing by itself."""
